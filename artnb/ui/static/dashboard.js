// What does a view of a run do? It takes numbered messages, draws, and sends back what a person asks for.
// uPlot, chart.js and strip.js stand before this in the same module. Nothing is ever set as HTML.

const REWARD = { id: "reward", section: "reward", title: "Mean reward", series: [["reward_mean", "mean"], ["reward_best", "best so far"]] };
const SECTIONS = { reward: "Reward", rollouts: "Rollouts", policy: "Policy", engine: "Engine and trainer", optimizer: "Optimizer", speed: "Speed and memory" };
const STATES = { running: "● running", ended: "■ not running", crashed: "✖ crashed" };
const SAY_SECONDS = 5;

// The run as far as messages told it.
class Picture {
  constructor() {
    this.clear();
    this.seq = null;
  }

  clear() {
    this.head = null;
    this.tables = { steps: new Map(), rollouts: new Map(), checks: new Map() };
  }

  // True when the message follows the last one.
  take(message) {
    if (message.reset) this.clear();
    else if (this.seq === null || message.seq !== this.seq + 1) return false;
    this.seq = message.seq;
    if (message.head) this.head = message.head;
    for (const [name, rows] of Object.entries(message.tables)) {
      for (const [key, row] of Object.entries(rows)) this.tables[name].set(key, row);
    }
    return true;
  }

  forCharts() {
    const byStep = (table) => [...table.values()].sort((a, b) => a.step - b.step);
    const rows = byStep(this.tables.steps), rollouts = this.tables.rollouts;
    return {
      steps: rows.map((row) => row.step),
      value: (name) => rows.map((row) => row.values[name] ?? rollouts.get(String(row.step))?.values[name] ?? null),
      baselines: this.head.baselines,
      checks: byStep(this.tables.checks),
      rollouts: byStep(rollouts),
    };
  }
}

class Page {
  constructor(root, send) {
    this.root = root;
    this.send = send;
    this.picture = new Picture();
    this.charts = new Map();
    this.left_out = new Set();
    this.said = 0;
    this.shared = { root, log: false, smoothing: 0, zoom: null, syncKey: `artnb-${Math.random()}`, onZoom: (range) => this.zoom(range) };
    root.classList.add("artnb");
    root.setAttribute("role", "region");
    root.setAttribute("aria-label", "Training dashboard");
    root.hidden = true; // until there is something to show: a static view may stand in for us
    this.build();
    this.setTheme();
    this.themes = new MutationObserver(() => this.setTheme());
    for (const element of [document.documentElement, document.body]) this.themes.observe(element, { attributes: true });
  }

  build() {
    this.name = make("h3", "artnb-name", "…");
    this.state = make("span", "artnb-state");
    this.facts = make("span", "artnb-facts");
    this.status = make("div", "artnb-hidden");
    this.status.setAttribute("role", "status");
    this.status.setAttribute("aria-live", "polite");
    const top = make("header", "artnb-top");
    top.append(this.name, this.state, this.facts);
    this.alarms = make("ul", "artnb-alarms");
    this.alarms.setAttribute("aria-label", "Alarms");
    this.body = make("div", "artnb-sections");
    this.strip = new Strip();
    this.events = make("ul", "artnb-events");
    this.root.append(top, this.buildControls(), this.alarms, this.buildOptions(), this.body, this.events, this.status);
    const chart = (this.rewardChart = new Chart(REWARD, this.shared));
    this.charts.set("reward", chart);
    this.body.append(chart.element, this.strip.element);
    this.sections = {};
  }

  button(text, act, title) {
    const button = make("button", "artnb-button", text);
    button.type = "button";
    if (title) button.title = title;
    button.addEventListener("click", act);
    return button;
  }

  field(label, placeholder, act, word) {
    const form = make("form", "artnb-field"), input = make("input"), submit = make("button", "artnb-button", word);
    input.placeholder = placeholder;
    input.setAttribute("aria-label", label);
    submit.type = "submit";
    form.append(input, submit);
    form.addEventListener("submit", (event) => { event.preventDefault(); act(input); });
    for (const kind of ["keydown", "keyup", "keypress"]) form.addEventListener(kind, (event) => event.stopPropagation());
    return [form, input];
  }

  buildControls() {
    const bar = make("div", "artnb-controls");
    const ask = (control, value = null) => this.send({ type: "control", control, value });
    this.stop = this.button("■ Stop after this step", () => ask("stop"), "The loop over run.steps() ends when its present step is done");
    this.pause = this.button("‖ Pause", () => ask(this.picture.head?.controls.paused ? "resume" : "pause"), "The next gather waits");
    const [rate, rateInput] = this.field("Learning rate from the next step", "learning rate", (input) => {
      const value = input.value.trim() === "" ? null : Number(input.value);
      if (value !== null && !(value > 0)) this.say("The learning rate must be a number above 0; empty means the notebook's own.");
      else { ask("learning_rate", value); input.value = ""; }
    }, "Set");
    rate.title = "From the next step on; empty gives the notebook's own back";
    this.rateInput = rateInput;
    const [note] = this.field("Note for the run's journal", "note", (input) => { this.send({ type: "note", text: input.value }); input.value = ""; }, "Add note");
    this.answer = make("span", "artnb-answer");
    this.answer.setAttribute("role", "status");
    bar.append(this.stop, this.pause, rate, note, this.answer);
    return bar;
  }

  buildOptions() {
    const bar = make("div", "artnb-options");
    const log = make("input");
    log.type = "checkbox";
    log.addEventListener("change", () => { this.shared.log = log.checked; this.draw(); });
    const smooth = make("input"), amount = make("output", "", "0");
    Object.assign(smooth, { type: "range", min: "0", max: "0.95", step: "0.05", value: "0" });
    smooth.addEventListener("input", () => { this.shared.smoothing = Number(smooth.value); amount.textContent = smooth.value; this.draw(); });
    for (const input of [log, smooth]) input.addEventListener("keydown", (event) => event.stopPropagation());
    const label = (words, ...parts) => { const element = make("label", "", words); element.append(...parts); return element; };
    this.all = this.button("Show all steps", () => this.zoom(null));
    this.all.hidden = true;
    this.picker = make("details", "artnb-picker");
    this.choices = make("div", "artnb-choices");
    this.picker.append(make("summary", "", "Choose charts"), this.choices);
    bar.append(label("Log scale ", log), label("Smoothing ", smooth, amount), this.all, this.picker, make("span", "artnb-hint", "Drag over a chart to zoom, double-click to go back"));
    return bar;
  }

  zoom(range) {
    this.shared.zoom = range;
    this.all.hidden = !range;
    for (const chart of this.charts.values()) chart.zoomTo(range);
  }

  take(message) {
    if (message.type === "answer") { this.say(message.text); return true; }
    if (message.type !== "view") return true;
    const follows = this.picture.take(message);
    if (follows && !message.more) this.schedule();
    return follows;
  }

  say(text) {
    this.answer.textContent = text;
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  draw() {
    const head = this.picture.head;
    if (!head) return;
    this.root.hidden = false;
    const picture = this.picture.forCharts();
    this.drawHead(head, picture);
    this.placeCharts(head.charts);
    for (const [id, chart] of this.charts) if (!this.left_out.has(id)) chart.update(picture);
    this.strip.update(picture.rollouts);
    this.root.dataset.steps = String(picture.steps.length);
    this.root.dataset.seq = String(this.picture.seq);
  }

  drawHead(head, picture) {
    const { paused, stop, learning_rate: rate } = head.controls, isRunning = head.status === "running";
    const count = picture.steps.length, last = count ? picture.steps[count - 1] : null;
    this.name.textContent = head.name;
    const words = isRunning && stop ? "■ stopping after this step" : isRunning && paused ? "‖ paused" : STATES[head.status];
    this.state.textContent = words;
    this.state.dataset.state = isRunning && (stop || paused) ? "waiting" : head.status;
    const reward = count ? picture.value("reward_mean")[count - 1] : null;
    const facts = [count ? `step ${last} done` : "no finished step yet"];
    if (reward !== null) facts.push(`mean reward ${numberText(reward)}`);
    if (head.best) facts.push(`best ${numberText(head.best.reward)} at step ${head.best.step}`);
    if (rate !== null) facts.push(`learning rate set to ${numberText(rate)}`);
    this.facts.textContent = facts.join(" · ");
    this.stop.disabled = stop || !isRunning;
    this.pause.disabled = !isRunning || stop;
    this.pause.textContent = paused ? "▶ Go on" : "‖ Pause";
    this.rateInput.placeholder = rate === null ? "learning rate" : `now ${numberText(rate)}`;
    this.alarms.replaceChildren(...head.alarms.map((alarm) => {
      const item = make("li", alarm.level === "serious" ? "artnb-serious" : "");
      item.append(make("b", "", `${alarm.level === "serious" ? "⛔" : "⚠"} ${alarm.kind} (step ${alarm.step})`), make("span", "", ` ${alarm.text}`));
      return item;
    }));
    this.events.replaceChildren(...head.events.map((event) => {
      const when = event.time ? new Date(1000 * event.time).toLocaleTimeString() : "";
      return make("li", "", `${when} ${event.text}`);
    }));
    const now = performance.now() / 1000;
    if (now - this.said > SAY_SECONDS) {
      this.said = now;
      this.status.textContent = `${words}, ${facts.join(", ")}, ${head.alarms.length} alarms`;
    }
  }

  placeCharts(specs) {
    const wanted = new Map(specs.map((spec) => [spec.id, spec]));
    for (const spec of specs) {
      const known = this.charts.get(spec.id);
      if (known && JSON.stringify(known.spec) === JSON.stringify(spec)) continue;
      const chart = new Chart(spec, this.shared);
      if (known) { known.element.replaceWith(chart.element); known.destroy(); }
      else this.section(spec.section).append(chart.element);
      if (!known) this.choices.append(this.choice(spec));
      this.charts.set(spec.id, chart);
      chart.element.hidden = this.left_out.has(spec.id);
    }
    for (const [id, chart] of this.charts) {
      if (id === "reward" || wanted.has(id)) continue;
      chart.element.remove();
      chart.destroy();
      this.charts.delete(id);
    }
  }

  section(name) {
    if (!this.sections[name]) {
      const box = make("details", "artnb-section"), grid = make("div", "artnb-grid");
      box.open = true;
      box.append(make("summary", "", SECTIONS[name] || name), grid);
      this.sections[name] = grid;
      const order = Object.keys(SECTIONS), boxes = [...this.body.querySelectorAll(".artnb-section")];
      box.dataset.order = String(order.indexOf(name));
      const next = boxes.find((other) => Number(other.dataset.order) > order.indexOf(name));
      this.body.insertBefore(box, next || null);
    }
    return this.sections[name];
  }

  choice(spec) {
    const label = make("label", ""), box = make("input");
    box.type = "checkbox";
    box.checked = !this.left_out.has(spec.id);
    box.addEventListener("change", () => {
      box.checked ? this.left_out.delete(spec.id) : this.left_out.add(spec.id);
      this.charts.get(spec.id).element.hidden = !box.checked;
      this.draw();
    });
    label.append(box, make("span", "", spec.title));
    return label;
  }

  // Light or dark by what is really behind us: JupyterLab, Colab and VS Code say it in different ways.
  setTheme() {
    const channels = getComputedStyle(this.root).backgroundColor.match(/[\d.]+/g) || ["255", "255", "255"];
    const [red, green, blue] = channels.map(Number);
    const theme = 0.3 * red + 0.59 * green + 0.11 * blue < 128 ? "dark" : "light";
    if (this.root.dataset.theme === theme) return;
    this.root.dataset.theme = theme;
    for (const chart of this.charts.values()) chart.recolour();
  }

  destroy() {
    this.themes.disconnect();
    for (const chart of this.charts.values()) chart.destroy();
    if (this.waiting) cancelAnimationFrame(this.waiting);
  }
}

export default {
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
