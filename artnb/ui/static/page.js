// What do pages that are told everything in numbered messages share? Elements, and how a view joins and leaves.

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// A widget whose view is a Page: take(message) says whether it follows the last one, else all is asked for.
function widgetOf(Page) {
  return {
    render({ model, el }) {
      const view = Math.random().toString(36).slice(2);
      const root = make("div");
      el.append(root);
      const send = (message) => model.send({ ...message, view });
      const page = new Page(root, send);
      let asked = 0;
      const hear = (message) => {
        if (page.take(message) || performance.now() - asked < 1000) return;
        asked = performance.now();
        send({ type: "resync" });
      };
      model.on("msg:custom", hear);
      send({ type: "ready" });
      return () => {
        model.off("msg:custom", hear);
        page.destroy();
        send({ type: "gone" });
      };
    },
  };
}
