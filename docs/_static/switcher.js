// Fill the sidebar's choice of versions from versions.js, and lead to the same page of another one where it has it.
(() => {
  const versions = window.SITE_VERSIONS || [];
  const choice = document.getElementById("version-switcher");
  if (!choice || !versions.length) return;
  const root = new URL(document.documentElement.dataset.content_root, location.href); // of this version
  const here = root.pathname.split("/").filter(Boolean).at(-1);
  const page = decodeURIComponent(location.pathname.slice(root.pathname.length)) || "index.html";
  for (const { name, pages } of versions) {
    const option = new Option(name, `../${name}/${pages.includes(page) ? page : "index.html"}`, false, name === here);
    choice.append(option);
  }
  choice.addEventListener("change", () => location.assign(new URL(choice.value, root)));
  choice.parentElement.hidden = false;
})();
