// What does the view of a chat do? It takes numbered messages, draws, and sends back what a person says or
// chooses. Nothing is ever set as HTML: what a model, a tool or a person wrote stands there as text.

// Control and bidi characters, which could make a text look like another one, become visible.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200c\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g;
const visible = (text) => String(text).replace(HIDDEN, (c) => `‹U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);

// The conversation as far as messages told it.
class Picture {
  constructor() {
    this.seq = null;
    this.clear();
  }

  clear() {
    this.head = null;
    this.entries = new Map();
  }

  // True when the message follows the last one.
  take(message) {
    if (message.reset) this.clear();
    else if (this.seq === null || message.seq !== this.seq + 1) return false;
    this.seq = message.seq;
    if (message.head) this.head = message.head;
    for (const [key, entry] of Object.entries(message.tables.entries || {})) this.entries.set(Number(key), entry);
    return true;
  }
}

class Page {
  constructor(root, send) {
    this.root = root;
    this.send = send;
    this.picture = new Picture();
    this.drawn = new Map(); // index -> [entry, element]
    root.classList.add("artnb-talk");
    root.setAttribute("role", "region");
    root.setAttribute("aria-label", "Chat with the policy");
    root.hidden = true; // until there is something to show: a static view may stand in for us
    this.build();
    this.endTheme = followTheme(root);
  }

  build() {
    this.facts = make("span", "artnb-talk-facts");
    this.status = make("span", "artnb-talk-status");
    const top = make("header", "artnb-talk-top");
    top.append(this.facts, this.status);
    this.log = make("div", "artnb-talk-log");
    this.log.tabIndex = 0;
    this.log.setAttribute("role", "log");
    this.log.setAttribute("aria-live", "off"); // streamed text would be read again and again: see spoken
    this.log.setAttribute("aria-label", "Conversation");
    this.opening = make("details");
    this.openingTitle = make("summary");
    this.opening.append(this.openingTitle);
    this.said = make("div");
    this.pending = make("div", "artnb-talk-entry");
    this.pending.dataset.role = "assistant";
    this.pending.dataset.pending = "true";
    this.pendingText = make("div", "artnb-talk-text");
    this.pendingHead = make("div", "artnb-talk-head");
    this.pending.append(this.pendingHead, this.pendingText);
    this.log.append(this.opening, this.said, this.pending);
    this.spoken = make("div", "artnb-talk-hidden");
    this.spoken.setAttribute("role", "status");
    this.root.append(top, this.buildSettings(), this.log, this.buildSay(), this.spoken);
  }

  label(words, element) {
    const label = make("label", "", `${words} `);
    label.append(element);
    for (const kind of ["keydown", "keyup", "keypress"]) element.addEventListener(kind, (event) => event.stopPropagation());
    return label;
  }

  number(name, step, words) {
    const input = make("input");
    Object.assign(input, { type: "number", min: step === "1" ? "1" : "0", step });
    input.addEventListener("change", () => {
      const value = input.value.trim() === "" ? null : Number(input.value);
      this.send({ type: "choose", [name]: value });
    });
    return [input, this.label(words, input)];
  }

  buildSettings() {
    const bar = make("div", "artnb-talk-settings");
    this.policy = make("select");
    this.policy.addEventListener("change", () => this.send({ type: "choose", policy: this.policy.value }));
    this.policy.addEventListener("focus", () => this.send({ type: "look" })); // training goes on meanwhile
    this.scenario = make("select");
    this.scenario.addEventListener("change", () => this.send({ type: "reset", scenario: this.scenario.selectedIndex }));
    const [temperature, temperatureLabel] = this.number("temperature", "0.1", "Temperature");
    const [tokens, tokensLabel] = this.number("max_tokens", "1", "Most tokens");
    Object.assign(this, { temperature, tokens });
    this.scenarioLabel = this.label("Scenario", this.scenario);
    bar.append(this.label("Policy", this.policy), this.scenarioLabel, temperatureLabel, tokensLabel);
    return bar;
  }

  button(text, act, title) {
    const button = make("button", "", text);
    button.type = "button";
    button.title = title;
    button.addEventListener("click", act);
    return button;
  }

  buildSay() {
    const box = make("div");
    const line = make("div", "artnb-talk-say");
    this.input = make("textarea");
    this.input.setAttribute("aria-label", "Your message");
    this.input.placeholder = "Say something";
    for (const kind of ["keyup", "keypress"]) this.input.addEventListener(kind, (event) => event.stopPropagation());
    this.input.addEventListener("keydown", (event) => {
      event.stopPropagation(); // the notebook has shortcuts of its own
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.say();
      }
    });
    line.append(this.input);
    const bar = make("div", "artnb-talk-buttons");
    this.sendButton = this.button("Send", () => this.say(), "Enter does the same");
    this.goOn = this.button("Let it answer", () => this.ask({ type: "say", text: null }), "The model answers what stands there");
    this.stop = this.button("■ Stop", () => this.send({ type: "stop" }), "End the answer under way");
    this.reset = this.button("Reset", () => this.ask({ type: "reset" }), "A new conversation; this one stays in the run");
    this.answer = make("span", "artnb-talk-answer");
    this.answer.setAttribute("role", "alert");
    const hint = make("span", "artnb-talk-hint", "Enter sends, Shift+Enter begins a line");
    bar.append(this.sendButton, this.goOn, this.stop, this.reset, hint, this.answer);
    box.append(line, bar);
    return box;
  }

  get isBusy() {
    return !this.picture.head || this.picture.head.status !== "ready";
  }

  ask(message) {
    if (!this.isBusy) this.send(message);
  }

  say() {
    const text = this.input.value;
    if (this.isBusy || text.trim() === "") return;
    this.input.value = "";
    this.send({ type: "say", text });
  }

  take(message) {
    if (message.type !== "view") return true;
    const follows = this.picture.take(message);
    if (follows && !message.more) this.schedule();
    return follows;
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  draw() {
    const head = this.picture.head;
    if (!head) return;
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    const wasBusy = this.root.dataset.busy === "true", isBusy = head.status !== "ready";
    this.root.hidden = false;
    this.root.dataset.busy = String(isBusy);
    this.facts.textContent = visible(head.facts);
    this.status.textContent = head.status;
    this.status.dataset.busy = String(isBusy);
    this.drawSettings(head, isBusy);
    this.drawEntries();
    this.pending.hidden = !isBusy;
    this.pendingHead.textContent = head.pending ? "assistant, so far" : head.status;
    this.pendingText.textContent = visible(head.pending);
    this.answer.textContent = visible(head.answer);
    if (head.taken_back && wasBusy && !isBusy && this.input.value === "") this.input.value = head.taken_back;
    if (wasBusy && !isBusy) this.speak();
    if (atEnd || (isBusy && !wasBusy)) this.log.scrollTop = this.log.scrollHeight;
  }

  drawSettings(head, isBusy) {
    const options = (select, names, chosen) => {
      if ([...select.options].map((one) => one.value).join("\n") !== names.join("\n")) {
        select.replaceChildren(...names.map((name) => {
          const option = make("option", "", visible(name));
          option.value = name;
          return option;
        }));
      }
      select.selectedIndex = chosen;
    };
    options(this.policy, head.policies, head.policies.indexOf(head.policy));
    options(this.scenario, head.scenarios, head.scenario);
    this.scenarioLabel.hidden = head.scenarios.length === 0;
    for (const [input, value] of [[this.temperature, head.temperature], [this.tokens, head.max_tokens]]) {
      if (document.activeElement !== input) input.value = String(value);
    }
    for (const element of [this.scenario, this.sendButton, this.reset]) element.disabled = isBusy;
    this.goOn.disabled = isBusy || !head.can_go_on;
    this.stop.disabled = !isBusy;
  }

  drawEntries() {
    const entries = this.picture.entries;
    for (const [index, [, element]] of this.drawn) {
      if (entries.has(index)) continue;
      element.remove();
      this.drawn.delete(index);
    }
    let openings = 0;
    for (const index of [...entries.keys()].sort((a, b) => a - b)) {
      const entry = entries.get(index), known = this.drawn.get(index);
      openings += entry.is_opening ? 1 : 0;
      if (known && known[0] === entry) continue;
      const element = this.entry(entry);
      if (known) known[1].replaceWith(element);
      else (entry.is_opening ? this.opening : this.said).append(element);
      this.drawn.set(index, [entry, element]);
    }
    this.opening.hidden = openings === 0;
    this.openingTitle.textContent = `${openings} ${openings === 1 ? "message" : "messages"} that the agent reads first`;
    this.root.dataset.entries = String(entries.size);
  }

  entry(entry) {
    const box = make("div", "artnb-talk-entry"), head = make("div", "artnb-talk-head");
    box.dataset.role = entry.role;
    const facts = [];
    if (entry.tokens !== undefined) {
      facts.push(`${entry.tokens} tokens`, entry.policy_version < 0 ? "base" : `policy ${entry.policy_version}`);
      if (entry.mean_logprob !== null) facts.push(`mean logprob ${entry.mean_logprob.toFixed(2)}`);
      if (entry.finish_reason === "length") facts.push("cut off by the most tokens");
    }
    head.append(make("b", "", visible(entry.role)), make("span", "", facts.length ? ` ${facts.join(" · ")}` : ""));
    box.append(head);
    if (entry.reasoning) {
      const details = make("details");
      details.append(make("summary", "", "reasoning"), make("div", "artnb-talk-text", visible(entry.reasoning)));
      box.append(details);
    }
    if (entry.text || !entry.calls.length) box.append(make("div", "artnb-talk-text", visible(entry.text || "(empty)")));
    for (const call of entry.calls) box.append(make("div", "artnb-talk-call", `→ ${visible(call)}`));
    if (entry.problem) box.append(make("div", "artnb-talk-problem", `⚠ ${visible(entry.problem)}`));
    return box;
  }

  // To a screen reader: the last move, once it is whole.
  speak() {
    const last = [...this.picture.entries.values()].filter((entry) => entry.role === "assistant" && !entry.is_opening).pop();
    this.spoken.textContent = last ? `The model said: ${visible(last.text || last.calls.join(", "))}` : this.answer.textContent;
  }

  destroy() {
    this.endTheme();
    if (this.waiting) cancelAnimationFrame(this.waiting);
  }
}

export default widgetOf(Page);
