// Runs a model with onnxruntime-node or a build of onnxruntime-web, in Node or in a browser, and returns its outputs.

const TYPES = {float32: Float32Array, int64: BigInt64Array, bool: Uint8Array};

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function textOf(bytes) {
  let text = '';
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
}

export async function run(ort, {model, dims, input, providers}) {
  const session = await ort.InferenceSession.create(bytesOf(model), providers ? {executionProviders: providers} : {});
  const tensor = new ort.Tensor('float32', new Float32Array(bytesOf(input).buffer), dims);
  const outputs = await session.run({[session.inputNames[0]]: tensor});
  const found = {};
  for (const [name, {type, dims, data}] of Object.entries(outputs)) {
    const values = TYPES[type].from(data);
    found[name] = {type, dims: Array.from(dims), data: textOf(new Uint8Array(values.buffer))};
  }
  return found;
}

if (globalThis.process?.versions?.node) {
  const {readFileSync, writeSync} = await import('node:fs');
  const {module, ...task} = JSON.parse(readFileSync(0, 'utf8'));
  const loaded = await import(module);
  const ort = loaded.default ?? loaded;
  if (task.providers) ort.env.wasm.numThreads = 1;
  const text = await run(ort, task).then(JSON.stringify, (error) => JSON.stringify({error: String(error.message)}));
  for (let at = 0; at < text.length; ) at += writeSync(1, text.slice(at, at + 65536));
  process.exit(0); // a thread of the runtime may wait
}
