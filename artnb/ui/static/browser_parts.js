// What do all parts of the trajectory browser share? Elements, words for values, and questions to the kernel.
// Everything that a model, a tool or a person wrote becomes text nodes; nothing is ever set as HTML.

// el("td", { class: "x", title: hostile, click: act }, "text", otherElement): functions become listeners.
function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function button(text, click, attributes) {
  return el("button", { type: "button", class: "ab-button", click, ...attributes }, text);
}

function numberText(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(3)).toExponential().replace("-", "−");
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
  return text.replace("-", "−");
}

const signed = (value) => (value > 0 ? "+" : "") + numberText(value);
const countText = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : noun.endsWith("y") ? "" : "s"}`.replace(/y$/, n === 1 ? "y" : "ies");

function secondsText(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const STATUS = { scored: "✓", unscored: "○", failed: "✖", "rolled back": "↶" };
const statusText = (status) => `${STATUS[status] || "·"} ${status}`;

// A long text that opens on demand.
function longText(text, most, className) {
  if (text.length <= most) return el("div", { class: className }, text);
  const box = el("div", { class: className }, text.slice(0, most), " …");
  const more = button(`Show all ${text.length.toLocaleString("en")} characters`, () => { box.textContent = text; more.remove(); }, { class: "ab-link" });
  return el("div", {}, box, more);
}

function folded(summary, ...body) {
  return el("details", { class: "ab-folded" }, el("summary", {}, summary), ...body);
}

// A button that opens a panel below itself; Escape and a click elsewhere close it.
class Menu {
  constructor(text, title, fill) {
    this.panel = el("div", { class: "ab-panel", hidden: true });
    this.button = button(text, () => (this.panel.hidden ? this.open() : this.close()), { title, "aria-expanded": "false", "aria-haspopup": "true" });
    this.element = el("span", { class: "ab-menu" }, this.button, this.panel);
    this.fill = fill;
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || this.panel.hidden) return;
      event.stopPropagation();
      this.close();
      this.button.focus();
    });
    this.element.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !this.element.contains(event.relatedTarget)) this.close();
    });
    this.outside = (event) => { if (!event.composedPath().includes(this.element)) this.close(); };
  }

  open() {
    this.panel.replaceChildren(...[this.fill(this)].flat());
    this.panel.hidden = false;
    this.button.setAttribute("aria-expanded", "true");
    this.panel.style.left = "0";
    const box = this.panel.getBoundingClientRect(), root = this.element.closest(".artnb-browse").getBoundingClientRect();
    this.panel.style.left = `${Math.max(root.left + 8 - box.left, Math.min(0, root.right - 8 - box.right))}px`;
    document.addEventListener("pointerdown", this.outside);
    const first = this.panel.querySelector("button, input, select, textarea");
    if (first) first.focus();
  }

  close() {
    this.panel.hidden = true;
    this.button.setAttribute("aria-expanded", "false");
    document.removeEventListener("pointerdown", this.outside);
  }
}

// Tabs: [name, title, fill], each filled when it is first looked at.
class Tabs {
  constructor(label, tabs, chosen) {
    this.bar = el("div", { class: "ab-tabs", role: "tablist", "aria-label": label });
    this.body = el("div", { class: "ab-tabbody", role: "tabpanel", tabindex: "-1" });
    this.element = el("div", {}, this.bar, this.body);
    this.filled = new Map();
    this.tabs = tabs;
    this.buttons = tabs.map(([name, title]) => el("button", { type: "button", role: "tab", class: "ab-tab", click: () => this.show(name) }, title));
    this.bar.append(...this.buttons);
    this.bar.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      const next = (this.tabs.findIndex(([name]) => name === this.chosen) + step + tabs.length) % tabs.length;
      this.show(tabs[next][0]);
      this.buttons[next].focus();
    });
    this.show(tabs.some(([name]) => name === chosen) ? chosen : tabs[0][0]);
  }

  show(name) {
    this.chosen = name;
    this.tabs.forEach(([other, , fill], index) => {
      const isShown = other === name;
      this.buttons[index].setAttribute("aria-selected", String(isShown));
      this.buttons[index].tabIndex = isShown ? 0 : -1;
      if (isShown && !this.filled.has(name)) this.filled.set(name, fill());
    });
    this.body.replaceChildren(this.filled.get(name));
    if (this.onshow) this.onshow(name);
  }
}

// Questions to the kernel, each answered once; long answers come in parts.
class Kernel {
  constructor(model, view) {
    this.model = model;
    this.view = view;
    this.last = 0;
    this.open = new Map();
  }

  ask(what, asked) {
    const id = (this.last += 1);
    return new Promise((resolve, reject) => {
      this.open.set(id, { resolve, reject, parts: [], asked: performance.now() });
      this.model.send({ ...asked, type: "ask", id, view: this.view, what });
    });
  }

  get waiting() {
    const oldest = this.open.values().next().value;
    return oldest ? (performance.now() - oldest.asked) / 1000 : 0;
  }

  hear(message) {
    const asked = message.view === this.view && this.open.get(message.id);
    if (!asked) return;
    let data = message.data;
    if (message.type === "part") {
      asked.parts[message.seq] = message.text;
      for (let i = 0; i < message.of; i += 1) if (asked.parts[i] === undefined) return;
      data = JSON.parse(asked.parts.join(""));
    }
    this.open.delete(message.id);
    if (message.error !== undefined) asked.reject(new Error(message.error));
    else asked.resolve(data);
  }
}

async function toClipboard(text, where) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch (refused) { // no permission, or not a secure page: a person can copy it from a box
    const box = el("textarea", { class: "ab-copybox", readonly: true, "aria-label": `Text to copy (the page may not: ${refused.name})`, rows: 8 });
    box.value = text;
    where.replaceChildren(box);
    box.select();
    return false;
  }
}
