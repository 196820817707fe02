// What did the policy think of each token? Every token of a history, coloured by one of its values.

const MOST_SPANS = 20000, BINS = 9;
const SCALES = {
  logprob: { title: "logprob (engine)", about: "of each sampled token when it was sampled", kind: "low", low: -5, high: 0 },
  trainer_logprob: { title: "logprob (trainer)", about: "of the same token when it was trained on", kind: "low", low: -5, high: 0 },
  gap: { title: "trainer − engine", about: "difference of the two logprobs: near 0 when they agree", kind: "signed", most: 0.5 },
  ratio: { title: "ratio", about: "new probability over the sampling one, 1 when the policy has not moved", kind: "ratio", most: Math.log(2) },
  advantage: { title: "advantage", about: "above 0 the token is made likelier, below 0 less likely", kind: "signed" },
  entropy: { title: "entropy", about: "how undecided the policy was, in nats", kind: "high", low: 0 },
  weight: { title: "loss mask", about: "loss weight: 0 is not trained on", kind: "high", low: 0 },
};

class TokenView {
  // load(history, start) asks the kernel; histories: titles.
  constructor(load, histories, from) {
    this.load = load;
    this.from = from;
    this.choice = "logprob";
    this.histories = histories;
    this.bar = el("div", { class: "ab-tokenbar" });
    this.legend = el("div", { class: "ab-legend" });
    this.reading = el("div", { class: "ab-reading", role: "status", "aria-live": "polite" });
    this.text = el("div", { class: "ab-tokens", tabindex: "0", role: "application", "aria-label": "Tokens; arrow keys read them one by one", "data-lm-suppress-shortcuts": "true" });
    this.element = el("div", { class: "ab-tokenview" }, this.bar, this.legend, this.reading, this.text);
    this.text.addEventListener("pointerover", (event) => this.point(event.target));
    this.text.addEventListener("click", (event) => this.point(event.target));
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.bring(0, 0);
  }

  async bring(history, start) {
    this.reading.textContent = "Reading the tokens …";
    try {
      this.take(await this.load(history, start));
    } catch (error) {
      this.reading.textContent = `⚠ ${error.message}`;
    }
  }

  take(told) {
    this.told = told;
    this.values = { ...told.values };
    this.missing = { ...told.missing };
    const { logprob, trainer_logprob: trainer } = this.values;
    if (logprob && trainer) this.values.gap = logprob.map((value, i) => (value === null || trainer[i] === null ? null : trainer[i] - value));
    else this.missing.gap = this.missing.trainer_logprob || this.missing.logprob || "a logprob is missing";
    if (!this.values.weight) {
      this.values.weight = told.sampled.slice();
      this.note = `Loss weights: ${this.missing.weight || "not recorded"}; shown is which tokens were sampled.`;
      delete this.missing.weight;
    } else this.note = "";
    const started = performance.now();
    this.drawBar();
    this.build();
    this.colour(this.values[this.choice] ? this.choice : Object.keys(SCALES).find((name) => this.values[name]));
    this.element.dataset.milliseconds = String(Math.round(performance.now() - started));
    this.reading.textContent = "Point at a token, or use the arrow keys, to read its values.";
  }

  drawBar() {
    const choices = el("span", { role: "radiogroup", "aria-label": "Colour by", class: "ab-segments" });
    for (const [name, scale] of Object.entries(SCALES)) {
      const why = this.values[name] ? null : this.missing[name] || "not recorded";
      choices.append(el("button", { type: "button", role: "radio", class: "ab-segment", "data-name": name, disabled: why !== null, title: why ? `Not there: ${why}` : scale.about, click: () => this.colour(name) }, scale.title));
    }
    const { start, ids, total } = this.told, parts = [choices];
    if (this.histories.length > 1) {
      const pick = el("select", { "aria-label": "History", change: () => this.bring(Number(pick.value), 0) }, this.histories.map((title, i) => el("option", { value: i, selected: i === this.told.history }, title)));
      parts.push(pick);
    }
    parts.push(el("span", { class: "ab-quiet" }, `${countText(total, "token")}, ${sampledText(this.told)} sampled`));
    if (start > 0) parts.push(button("← earlier", () => this.bring(this.told.history, Math.max(0, start - MOST_SPANS))));
    if (start + ids.length < total) parts.push(button("later →", () => this.bring(this.told.history, start + ids.length)));
    this.bar.replaceChildren(...parts);
  }

  // One span a token, up to a number of spans; then tokens that were not sampled share one.
  build() {
    const { ids, texts, sampled, turn, rows } = this.told, starts = new Set(rows.slice(1)), isMerged = ids.length > MOST_SPANS;
    const fragment = document.createDocumentFragment();
    this.spans = [];
    for (let i = 0; i < ids.length; i += 1) {
      if (starts.has(this.told.start + i)) fragment.append(el("div", { class: "ab-rowbreak" }, "a row of its own: the prompt does not extend the tokens before"));
      let last = i;
      if (isMerged && !sampled[i]) while (last + 1 < ids.length && !sampled[last + 1] && !starts.has(this.told.start + last + 1)) last += 1;
      const span = document.createElement("span");
      span.textContent = texts ? visibleText(texts, i, last) : ids.slice(i, last + 1).join(" ") + " ";
      span.token = i;
      if (sampled[i] && (i === 0 || turn[i] !== turn[i - 1] || !sampled[i - 1])) span.id = `${this.from}-t${turn[i]}`;
      this.spans.push(span);
      fragment.append(span);
      i = last;
    }
    this.text.replaceChildren(fragment);
    this.current = null;
  }

  colour(name) {
    this.choice = name;
    const scale = SCALES[name], values = this.values[name] || [], range = this.told.ranges[name] || [0, 1];
    const bin = binOf(scale, values, range);
    for (const span of this.spans) {
      const i = span.token;
      if (!this.told.sampled[i]) span.className = "ab-t ab-context";
      else if (values[i] === null || values[i] === undefined) span.className = "ab-t ab-none";
      else span.className = `ab-t ${bin(values[i])}`;
    }
    for (const choice of this.bar.querySelectorAll("[role=radio]")) choice.setAttribute("aria-checked", String(choice.dataset.name === name));
    this.drawLegend(scale, bin.ends);
    if (this.current) this.read(this.current);
  }

  drawLegend(scale, ends) {
    const swatches = el("span", { class: "ab-swatches" }), names = scale.kind === "signed" || scale.kind === "ratio" ? "d" : scale.kind === "low" ? "w" : "s";
    for (let i = 0; i < BINS; i += 1) swatches.append(el("span", { class: `ab-t ab-${names}${i}` }, names === "d" ? (i < 3 ? "−" : i > 5 ? "+" : "·") : "·"));
    const parts = [el("span", {}, ends[0]), swatches, el("span", {}, ends[1]), el("span", { class: "ab-quiet" }, scale.about)];
    parts.push(el("span", { class: "ab-t ab-context" }, "given"), el("span", { class: "ab-t ab-none" }, "no value"));
    if (names === "d") parts.push(el("span", { class: "ab-quiet" }, "below the middle is underlined"));
    if (names === "w") parts.push(el("span", { class: "ab-quiet" }, "very unlikely is underlined"));
    const why = Object.entries(this.missing).filter(([name]) => name !== "gap").map(([name, words]) => `${SCALES[name] ? SCALES[name].title : name}: ${words}`);
    this.legend.replaceChildren(...parts, this.note ? el("div", { class: "ab-quiet" }, this.note) : "", why.length ? folded("What is not there, and why", ...why.map((words) => el("div", {}, words))) : "");
  }

  point(target) {
    if (target.token !== undefined) this.read(target);
  }

  read(span) {
    const i = span.token, { ids, texts, sampled, turn, start } = this.told;
    if (this.current) this.current.classList.remove("ab-here");
    this.current = span;
    span.classList.add("ab-here");
    const word = texts ? JSON.stringify(texts[i]) : "";
    const facts = [el("b", { class: "ab-mono" }, word || `id ${ids[i]}`), `id ${ids[i]}`, `token ${start + i + 1}`];
    if (!sampled[i]) facts.push("given, not sampled");
    else {
      facts.push(`turn ${turn[i] + 1}`);
      const value = (name) => (this.values[name] ? this.values[name][i] ?? null : null);
      const engine = value("logprob"), trainer = value("trainer_logprob");
      if (engine !== null) facts.push(`engine ${numberText(engine)} (p ${numberText(Math.exp(engine))})`);
      facts.push(`trainer ${numberText(trainer)}${engine === null || trainer === null ? "" : ` (${signed(trainer - engine)})`}`);
      for (const name of ["ratio", "advantage", "entropy", "weight"]) if (value(name) !== null) facts.push(`${name} ${name === "advantage" ? signed(value(name)) : numberText(value(name))}`);
    }
    span.title = facts.map((fact) => fact.textContent || fact).join(" · ");
    this.reading.replaceChildren(...facts.map((fact) => el("span", {}, fact)));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const at = this.current ? this.spans.indexOf(this.current) + step : 0, span = this.spans[Math.max(0, Math.min(this.spans.length - 1, at))];
    if (!span) return;
    this.read(span);
    span.scrollIntoView({ block: "nearest" });
  }

  // Scroll to a turn's first sampled token.
  goTo(turn) {
    const span = this.spans && this.spans.find((one) => one.id === `${this.from}-t${turn}`);
    if (!span) return;
    this.read(span);
    span.scrollIntoView({ block: "center" });
  }
}

const sampledText = (told) => told.sampled.reduce((sum, one) => sum + one, 0).toLocaleString("en");

function visibleText(texts, from, to) {
  const text = from === to ? texts[from] : texts.slice(from, to + 1).join("");
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t").replace(/\r/g, "␍");
}

// value -> class; .ends are the words at the ends of the legend. ab-s: more is darker, ab-w: lower is darker,
// ab-d: two colours about a middle.
function binOf(scale, values, [low, high]) {
  const clamp = (x) => Math.max(0, Math.min(BINS - 1, Math.floor(x * BINS)));
  let bin, ends;
  if (scale.kind === "low") {
    bin = (value) => `ab-w${clamp((scale.high - value) / (scale.high - scale.low))}`;
    ends = ["certain (0)", `${numberText(scale.low)} or less`];
  } else if (scale.kind === "high") {
    const top = Math.max(high, ...(values.length < 1000 ? values.filter((v) => v !== null) : []), 1e-9);
    bin = (value) => (value <= 0 ? "ab-s0" : `ab-s${Math.max(1, clamp(value / top))}`);
    ends = ["0", numberText(top)];
  } else if (scale.kind === "ratio") {
    bin = (value) => `ab-d${clamp(0.5 + Math.log(Math.max(value, 1e-9)) / (2 * scale.most))}`;
    ends = ["0.5 or less", "2 or more"];
  } else {
    const most = scale.most || Math.max(Math.abs(low), Math.abs(high), 1e-9);
    bin = (value) => `ab-d${clamp(0.5 + value / (2 * most))}`;
    ends = [numberText(-most), signed(most)];
  }
  return Object.assign(bin, { ends });
}
