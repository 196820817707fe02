// What does a view of a run do? It takes numbered messages, draws, and sends back what a person asks for.
// uPlot, chart.js, strip.js and controls.js stand before this in the same module. Nothing is ever set as HTML.

const REWARD = { id: "reward", section: "reward", title: "Mean reward", series: [["reward_mean", "mean"], ["reward_best", "best so far"]] };
const SECTIONS = { reward: "Reward", rollouts: "Rollouts", policy: "Policy", engine: "Engine and trainer", optimizer: "Optimizer", speed: "Speed and memory" };
const STATES = { running: "● running", idle: "■ no loop is running", ended: "■ not open", crashed: "✖ crashed" };
const SAY_SECONDS = 5;

// A run as far as messages told it.
class Picture {
  constructor() {
    this.clear();
    this.seq = null;
  }

  clear() {
    this.head = null;
    this.tables = { steps: new Map(), rollouts: new Map(), checks: new Map() };
    this.rows = null;
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
    this.rows = null;
    return true;
  }

  byStep(name) {
    return [...this.tables[name].values()].sort((a, b) => a.step - b.step);
  }

  // Steps in order, the figures of their rollouts among their values.
  steps() {
    if (!this.rows) {
      this.rows = this.byStep("steps").map((row) => ({ step: row.step, own: row.values, more: this.tables.rollouts.get(String(row.step))?.values }));
    }
    return this.rows;
  }
}

// What charts draw: one run's numbers, or those of several on a common line of steps.
function forCharts(pictures) {
  const rows = pictures.map((picture) => picture.steps());
  const value = (name) => (row) => (row ? row.own[name] ?? row.more?.[name] ?? null : null);
  const checks = pictures.flatMap((picture, run) => picture.byStep("checks").map((check) => ({ ...check, run })));
  const baselines = Object.assign({}, ...pictures.map((picture) => picture.head.baselines));
  if (pictures.length === 1) {
    return { steps: rows[0].map((row) => row.step), value: (name) => rows[0].map(value(name)), baselines, checks };
  }
  const steps = [...new Set(rows.flatMap((own) => own.map((row) => row.step)))].sort((a, b) => a - b);
  const known = rows.map((own) => new Map(own.map((row) => [row.step, row])));
  return { steps, value: (name, run) => steps.map((step) => value(name)(known[run].get(step))), baselines, checks };
}

// False in a section that is folded: what nobody sees is not drawn.
function isSeen(element) {
  return element.checkVisibility ? element.checkVisibility() : true;
}

class Page {
  constructor(root, send) {
    this.root = root;
    this.send = send;
    this.pictures = [new Picture()];
    this.chosen = 0; // whose buttons, alarms, groups and events are shown
    this.charts = new Map();
    this.left_out = new Set();
    this.said = 0;
    this.shared = { root, log: false, smoothing: 0, zoom: null, syncKey: `artnb-${Math.random()}`, onZoom: (range) => this.zoom(range) };
    root.classList.add("artnb");
    root.setAttribute("role", "region");
    root.setAttribute("aria-label", "Training dashboard");
    root.hidden = true; // until there is something to show: a static view may stand in for us
    this.build();
    this.endTheme = followTheme(root, () => { for (const chart of this.charts.values()) chart.recolour(); });
  }

  build() {
    this.name = make("h3", "artnb-name", "…");
    this.state = make("span", "artnb-state");
    this.facts = make("span", "artnb-facts");
    this.status = make("div", "artnb-hidden");
    this.status.setAttribute("role", "status");
    this.status.setAttribute("aria-live", "polite");
    const top = make("header", "artnb-top");
    this.runs = make("select", "artnb-runs");
    this.runs.setAttribute("aria-label", "Run whose buttons, alarms and groups are shown");
    this.runs.hidden = true;
    this.runs.addEventListener("change", () => { this.chosen = Number(this.runs.value); this.draw(); });
    this.runs.addEventListener("keydown", (event) => event.stopPropagation());
    top.append(this.name, this.runs, this.state, this.facts);
    this.controls = new Controls(
      (control, value) => this.send({ type: "control", control, value, run: this.chosen }),
      (text) => this.send({ type: "note", text, run: this.chosen }),
    );
    this.alarms = make("ul", "artnb-alarms");
    this.alarms.setAttribute("aria-label", "Alarms");
    this.body = make("div", "artnb-sections");
    this.strip = new Strip();
    this.events = make("ul", "artnb-events");
    this.root.append(top, this.controls.element, this.alarms, this.buildOptions(), this.body, this.events, this.status);
    this.body.append(this.strip.element);
    this.sections = {};
  }

  buildOptions() {
    const bar = make("div", "artnb-options");
    this.hint = make("span", "artnb-hint");
    const log = make("input");
    log.type = "checkbox";
    log.addEventListener("change", () => { this.shared.log = log.checked; this.draw(); });
    const smooth = make("input"), amount = make("output", "", "0");
    Object.assign(smooth, { type: "range", min: "0", max: "0.95", step: "0.05", value: "0" });
    smooth.addEventListener("input", () => { this.shared.smoothing = Number(smooth.value); amount.textContent = smooth.value; this.draw(); });
    for (const input of [log, smooth]) input.addEventListener("keydown", (event) => event.stopPropagation());
    const label = (words, ...parts) => { const element = make("label", "", words); element.append(...parts); return element; };
    this.all = make("button", "artnb-button", "Show all steps");
    this.all.type = "button";
    this.all.addEventListener("click", () => this.zoom(null));
    this.all.hidden = true;
    this.picker = make("details", "artnb-picker");
    this.choices = make("div", "artnb-choices");
    this.picker.append(make("summary", "", "Choose charts"), this.choices);
    bar.append(label("Log scale ", log), label("Smoothing ", smooth, amount), this.all, this.picker, this.hint);
    return bar;
  }

  zoom(range) {
    this.shared.zoom = range;
    this.all.hidden = !range;
    for (const chart of this.charts.values()) chart.zoomTo(range);
    this.askForDetail();
  }

  // Of a long run we know some steps: what lies between is told when somebody looks at it closely.
  askForDetail() {
    const { zoom } = this.shared;
    this.pictures.forEach((picture, run) => {
      if (zoom && picture.head && picture.tables.steps.size < picture.head.steps) this.send({ type: "detail", run, first: zoom[0], last: zoom[1] });
    });
  }

  take(message) {
    if (message.type === "answer") { this.controls.say(message.text); return true; }
    if (message.type !== "view") return true;
    while (this.pictures.length < message.runs) this.pictures.push(new Picture());
    const follows = this.pictures[message.run || 0].take(message);
    if (follows && message.reset) this.askForDetail();
    if (follows && !message.more) this.schedule();
    return follows;
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  draw() {
    if (this.pictures.some((picture) => !picture.head)) return;
    this.root.hidden = false;
    const picture = forCharts(this.pictures), chosen = this.pictures[this.chosen];
    this.drawHead(chosen);
    this.placeCharts(this.specs());
    for (const [id, chart] of this.charts) if (!this.left_out.has(id) && isSeen(chart.element)) chart.update(picture);
    this.strip.update(chosen.byStep("rollouts"));
    const known = this.pictures.reduce((sum, one) => sum + one.tables.steps.size, 0), all = this.pictures.reduce((sum, one) => sum + one.head.steps, 0);
    this.hint.textContent = `Drag over a chart to zoom, double-click to go back${known < all ? `; ${known.toLocaleString("en")} of ${all.toLocaleString("en")} steps are drawn, a zoom draws the others` : ""}`;
    this.root.dataset.steps = String(picture.steps.length);
    this.root.dataset.seq = String(chosen.seq);
  }

  // One run's charts as they come; of several runs a chart for each metric, a curve for each run.
  specs() {
    const specs = [REWARD, ...this.pictures[0].head.charts];
    if (this.pictures.length === 1) return specs;
    const known = new Set(specs.map((spec) => spec.id));
    for (const picture of this.pictures.slice(1)) specs.push(...picture.head.charts.filter((spec) => !known.has(spec.id) && known.add(spec.id)));
    const names = this.pictures.map((picture) => picture.head.name);
    return specs.flatMap((spec) => spec.series.filter(([metric]) => metric !== "reward_best").map(([metric, words]) => ({
      id: spec.id === "reward" ? "reward" : metric,
      section: spec.section,
      title: spec.series.length === 1 || spec.id === "reward" ? spec.title : `${spec.title}: ${words}`,
      isCompared: true,
      series: names.map((name, run) => [metric, name, run]),
    })));
  }

  drawHead(picture) {
    const head = picture.head, steps = picture.steps();
    const { paused, stop, roll_back: back, settings } = head.controls, isRunning = head.status === "running";
    const last = steps[steps.length - 1];
    const isMany = this.pictures.length > 1;
    this.name.textContent = isMany ? `${this.pictures.length} runs` : head.name;
    this.runs.hidden = !isMany;
    if (isMany) this.controls.fill(this.runs, this.pictures.map((one, run) => [String(run), `${one.head.name} (${one.head.status})`]));
    const waits = isRunning && (stop ? "■ stopping after this step" : back !== null ? `↶ going back to ${back === "best" ? "the best" : `step ${back}`}` : paused ? "‖ paused" : "");
    const words = waits || STATES[head.status];
    this.state.textContent = words;
    this.state.dataset.state = waits ? "waiting" : head.status;
    const facts = [last ? `step ${last.step} done` : "no finished step yet"];
    if (last?.own.reward_mean !== undefined) facts.push(`mean reward ${numberText(last.own.reward_mean)}`);
    if (head.best) facts.push(`best ${numberText(head.best.reward)} at step ${head.best.step}`);
    for (const [name, value] of Object.entries(settings)) facts.push(`${head.settings[name]} set to ${numberText(value)}`);
    this.facts.textContent = facts.join(" · ");
    this.controls.update(head);
    this.alarms.replaceChildren(...head.alarms.map((alarm) => {
      const item = make("li", alarm.level === "serious" ? "artnb-serious" : "");
      item.append(make("b", "", `${alarm.level === "serious" ? "‼" : "⚠"} ${alarm.kind} (step ${alarm.step})`), make("span", "", ` ${alarm.text}`));
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
      else if (spec.id === "reward") this.body.insertBefore(chart.element, this.strip.element);
      else this.section(spec.section).append(chart.element);
      if (!known) this.choices.append(this.choice(spec));
      this.charts.set(spec.id, chart);
      chart.element.hidden = this.left_out.has(spec.id);
    }
    for (const [id, chart] of this.charts) {
      if (wanted.has(id)) continue;
      chart.element.remove();
      chart.destroy();
      this.charts.delete(id);
    }
  }

  section(name) {
    if (!this.sections[name]) {
      const box = make("details", "artnb-section"), grid = make("div", "artnb-grid");
      box.open = true;
      box.addEventListener("toggle", () => this.draw());
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

  destroy() {
    this.endTheme();
    for (const chart of this.charts.values()) chart.destroy();
    if (this.waiting) cancelAnimationFrame(this.waiting);
  }
}

export default widgetOf(Page);
