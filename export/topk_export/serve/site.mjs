// Runs an exported model in the browser: the image never leaves it. The preprocessing is that of the Python runtime,
// pixel by pixel, so that the numbers are the same up to rounding.
import * as ort from "./ort/ort.wasm.bundle.min.mjs";

const $ = id => document.getElementById(id);
const PRECISION = 2 ** 22; // Pillow's fixed-point weights of 8-bit images
const KERNELS = {
  box: [0.5, x => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, x => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, x => (x === 0 ? 1 : Math.abs(x) >= 1 ? 0 : sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x)))],
  bicubic: [2, x => cubic(Math.abs(x))],
  lanczos: [3, x => (Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}

function cubic(x) {
  const a = -0.5;
  return x < 1 ? ((a + 2) * x - (a + 3)) * x * x + 1 : x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

// Python's rounding: halves go to the even number
function round(x) {
  const low = Math.floor(x);
  return x - low !== 0.5 ? Math.round(x) : low + (low % 2 === 0 ? 0 : 1);
}

function weights(from, to, [reach, kernel]) {
  const scale = from / to, stretch = Math.max(1, scale), support = reach * stretch, rows = [];
  for (let i = 0; i < to; i++) {
    const centre = (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - support + 0.5));
    const last = Math.min(from, Math.trunc(centre + support + 0.5));
    const w = [];
    for (let x = first; x < last; x++) w.push(kernel((x - centre + 0.5) / stretch));
    const total = w.reduce((a, b) => a + b, 0);
    rows.push([first, w.map(v => Math.trunc((v / total) * PRECISION + (v < 0 ? -0.5 : 0.5)))]);
  }
  return rows;
}

// One pass of Pillow's resampling along an axis of [lines, from, inner] bytes
function pass(data, lines, from, to, inner, kernel) {
  const out = new Uint8ClampedArray(lines * to * inner), rows = weights(from, to, kernel);
  for (let line = 0; line < lines; line++)
    for (let i = 0; i < to; i++) {
      const [first, w] = rows[i];
      for (let c = 0; c < inner; c++) {
        let sum = PRECISION / 2;
        for (let j = 0; j < w.length; j++) sum += w[j] * data[(line * from + first + j) * inner + c];
        out[(line * to + i) * inner + c] = Math.floor(sum / PRECISION);
      }
    }
  return out;
}

function nearest(image, height, width) {
  const { data, channels } = image, out = new Uint8ClampedArray(height * width * channels);
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++) {
      const sy = Math.floor(((y + 0.5) * image.height) / height), sx = Math.floor(((x + 0.5) * image.width) / width);
      for (let c = 0; c < channels; c++) out[(y * width + x) * channels + c] = data[(sy * image.width + sx) * channels + c];
    }
  return { data: out, height, width, channels };
}

function resize(image, height, width, name) {
  if (image.height === height && image.width === width) return image;
  if (name === "nearest") return nearest(image, height, width);
  const { channels } = image;
  let { data } = image;
  if (image.width !== width) data = pass(data, image.height, image.width, width, channels, KERNELS[name]);
  if (image.height !== height) data = pass(data, 1, image.height, height, width * channels, KERNELS[name]);
  return { data, height, width, channels };
}

function target(image, recipe) {
  const [scaleH, scaleW] = recipe.scale_size, { height: h, width: w } = image;
  if (recipe.crop_mode === "squash") return [scaleH, scaleW];
  if (recipe.crop_mode === "border" || scaleH !== scaleW) {
    const pick = recipe.crop_mode === "border" ? Math.max : Math.min, ratio = pick(h / scaleH, w / scaleW);
    return [round(h / ratio), round(w / ratio)];
  }
  const short = Math.min(h, w);
  return h === short ? [scaleH, Math.trunc((scaleH * w) / short)] : [Math.trunc((scaleH * h) / short), scaleH];
}

// Pad to at least the size, then crop the middle
function centre(image, height, width, fill) {
  const { channels } = image;
  const padH = Math.max(0, height - image.height), padW = Math.max(0, width - image.width);
  const above = Math.floor(padH / 2), before = Math.floor(padW / 2);
  const top = round((image.height + padH - height) / 2) - above, left = round((image.width + padW - width) / 2) - before;
  const out = new Uint8ClampedArray(height * width * channels);
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++)
      for (let c = 0; c < channels; c++) {
        const sy = y + top, sx = x + left, inside = sy >= 0 && sy < image.height && sx >= 0 && sx < image.width;
        out[(y * width + x) * channels + c] = inside ? image.data[(sy * image.width + sx) * channels + c] : fill[c];
      }
  return { data: out, height, width, channels };
}

async function decode(file, colour) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none", premultiplyAlpha: "none", imageOrientation: "none" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height), context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const rgba = context.getImageData(0, 0, bitmap.width, bitmap.height).data, channels = colour === "L" ? 1 : 3;
  const data = new Uint8ClampedArray((rgba.length / 4) * channels);
  for (let i = 0; i < rgba.length / 4; i++) {
    const [r, g, b] = rgba.subarray(4 * i, 4 * i + 3);
    if (channels === 1) data[i] = (19595 * r + 38470 * g + 7471 * b + 32768) >> 16;
    else data.set([r, g, b], 3 * i);
  }
  return { data, height: bitmap.height, width: bitmap.width, channels };
}

export async function preprocess(file, recipe) {
  const image = await decode(file, recipe.color);
  const [height, width] = target(image, recipe).map(x => Math.max(1, x));
  const [channels, h, w] = recipe.input_size;
  const fill = recipe.mean.map(m => (recipe.crop_mode === "border" ? round(255 * m) : 0));
  const { data } = centre(resize(image, height, width, recipe.interpolation), h, w, fill);
  if (recipe.in_graph) return new ort.Tensor("uint8", new Uint8Array(data), [1, h, w, channels]);
  const [low, high] = recipe.range, x = new Float32Array(channels * h * w);
  for (let i = 0; i < h * w; i++)
    for (let c = 0; c < channels; c++)
      x[c * h * w + i] = ((data[i * channels + c] / 255) * (high - low) + low - recipe.mean[c]) / recipe.std[c];
  return new ort.Tensor("float32", x, [1, channels, h, w]);
}

async function bytes(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(name + ": " + answer.status);
  return new Uint8Array(await answer.arrayBuffer());
}

async function load() {
  ort.env.wasm.wasmPaths = new URL("./ort/", location.href).href;
  ort.env.wasm.numThreads = 1;
  const model = await (await fetch("model.json")).json();
  const [content, ...weights] = await Promise.all(["model.onnx", ...model.weights].map(bytes));
  const externalData = model.weights.map((path, i) => ({ path, data: weights[i] }));
  const session = await ort.InferenceSession.create(content, { externalData });
  return { model, session };
}

function show(model, outputs) {
  const several = model.task === "multilabel", n = model.num_classes, logits = outputs.logits.data;
  const shares = (several ? outputs.probabilities : outputs.marginals).data;
  const order = [...Array(n).keys()].sort((a, b) => logits[b] - logits[a] || a - b);
  $("rows").replaceChildren(...order.slice(0, model.k).map(i => {
    const tr = document.createElement("tr");
    for (const text of [model.class_names[i], shares[i].toFixed(4)]) {
      const td = document.createElement("td");
      td.textContent = text;
      tr.append(td);
    }
    return tr;
  }));
  $("share").textContent = several ? "Probability" : "In top " + model.k;
  $("table").hidden = false;
  const names = inside => inside.map(i => model.class_names[i]).join(", ") || "none";
  if (outputs.labels) {
    $("labels").textContent = "Labels: " + names(order.filter(i => outputs.labels.data[i]));
    $("labels").hidden = false;
  }
  if (outputs.set_nodes) {
    const nodes = Array.from(outputs.set_nodes.data, Number).filter(i => i >= 0).map(i => model.sets.tree.names[i]);
    $("nodes").textContent = (nodes.length === 1 ? "Node: " : "Nodes: ") + nodes.join(" and ");
    $("nodes").hidden = false;
  }
  if (outputs.set) {
    const inside = order.filter(i => outputs.set.data[i]);
    $("set").textContent = (several ? "Set of " : "Prediction set of ") + inside.length + ": " + names(inside);
    $("set").hidden = false;
  }
}

try {
  const { model, session } = await load();
  $("about").textContent = model.num_classes + " classes; images stay in this browser."
    + (model.sets ? " Guarantee of the " + (model.task === "multilabel" ? "sets: " : "prediction sets: ") + model.sets.guarantee + "." : "");
  $("file").disabled = false;
  $("file").addEventListener("change", async event => {
    const file = event.target.files[0];
    if (!file) return;
    URL.revokeObjectURL($("preview").src);
    $("preview").src = URL.createObjectURL(file);
    $("preview").hidden = false;
    $("status").textContent = "Looking …";
    try {
      const start = performance.now();
      const outputs = await session.run({ [session.inputNames[0]]: await preprocess(file, model) });
      show(model, outputs);
      window.outputs = Object.fromEntries(Object.entries(outputs).map(([name, value]) => [name, Array.from(value.data, Number)]));
      $("status").textContent = "Done in " + (performance.now() - start).toFixed(0) + " ms";
    } catch (error) {
      $("status").textContent = "The image cannot be looked at: " + error.message;
    }
  });
} catch (error) {
  $("about").textContent = "The model does not load: " + error.message;
}
