// Is what is behind us light or dark? JupyterLab, Colab and VS Code say it in different ways: we look.

// Sets root.dataset.theme now, once the root stands in the page, and whenever the page changes; returns what
// ends it. ``changed`` is called after each change.
function followTheme(root, changed = () => {}) {
  let waiting = 0;
  const look = () => {
    const channels = getComputedStyle(root).backgroundColor.match(/[\d.]+/g) || ["255", "255", "255"];
    const [red, green, blue] = channels.map(Number);
    const theme = 0.3 * red + 0.59 * green + 0.11 * blue < 128 ? "dark" : "light";
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    changed();
  };
  const lookOnceInThePage = () => { waiting = root.isConnected ? 0 : requestAnimationFrame(lookOnceInThePage); if (!waiting) look(); };
  look();
  lookOnceInThePage();
  const observer = new MutationObserver(look);
  for (const element of [document.documentElement, document.body]) observer.observe(element, { attributes: true });
  return () => {
    observer.disconnect();
    cancelAnimationFrame(waiting);
  };
}
