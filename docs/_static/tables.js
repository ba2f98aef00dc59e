// Say of a table or a picture that is wider than its page that it scrolls, and let the keyboard scroll it.
(() => {
  const told = what => ({ tabindex: "0", role: "region", "aria-label": `${what}, scrolls sideways` });
  const boxes = new ResizeObserver(entries => {
    for (const { target } of entries) {
      const scrolls = target.scrollWidth > target.clientWidth + 1;
      target.classList.toggle("scrolls", scrolls);
      for (const [name, value] of Object.entries(told(target.matches(".wide-picture") ? "Picture" : "Table"))) {
        if (scrolls) target.setAttribute(name, value);
        else target.removeAttribute(name);
      }
    }
  });
  for (const box of document.querySelectorAll("[role=main] :is(.table-wrapper, .wide-picture)")) boxes.observe(box);
})();
