// What can a person ask of the loop? Buttons and fields that send it; the journal says when it is done.

const CONFIRM_SECONDS = 5;
const SAYING_SECONDS = 30;

class Controls {
  // ask(control, value), note(text): what is sent for the run that is chosen.
  constructor(ask, note) {
    this.ask = ask;
    this.element = make("div", "artnb-controls");
    this.stop = this.button("■ Stop after this step", () => ask("stop", null), "The loop over run.steps() ends when its present step is done; while paused, at once");
    this.pause = this.button("‖ Pause", () => ask(this.controls.paused ? "resume" : "pause", null), "The next gather, evaluate or train_step waits");
    this.answer = make("span", "artnb-answer");
    this.answer.setAttribute("role", "status");
    this.element.append(this.stop, this.pause, this.settingForm(), this.backForm(), this.noteForm(note), this.answer);
  }

  button(text, act, title) {
    const button = make("button", "artnb-button", text);
    button.type = "button";
    button.title = title;
    button.addEventListener("click", act);
    return button;
  }

  form(act, ...parts) {
    const form = make("form", "artnb-field");
    form.append(...parts);
    form.addEventListener("submit", (event) => { event.preventDefault(); act(); });
    for (const kind of ["keydown", "keyup", "keypress"]) form.addEventListener(kind, (event) => event.stopPropagation());
    return form;
  }

  submit(words) {
    const submit = make("button", "artnb-button", words);
    submit.type = "submit";
    return submit;
  }

  named(tag, label) {
    const input = make(tag);
    input.setAttribute("aria-label", label);
    return input;
  }

  settingForm() {
    this.setting = this.named("select", "Setting to change from the next step");
    this.value = this.named("input", "Its value from the next step; empty gives the notebook's own back");
    this.value.inputMode = "decimal";
    this.setting.addEventListener("change", () => this.placeholder());
    this.setButton = this.submit("Set");
    const form = this.form(() => this.set(), this.setting, this.value, this.setButton);
    form.title = "From the next step on; empty gives the notebook's own back";
    return form;
  }

  set() {
    const text = this.value.value.trim(), number = Number(text);
    if (text !== "" && !Number.isFinite(number)) return this.say("That is no number; empty means the notebook's own.");
    this.ask(this.setting.value, text === "" ? null : number);
    this.value.value = "";
  }

  placeholder() {
    const now = this.controls.settings[this.setting.value];
    this.value.placeholder = now === undefined ? "new value" : `now ${numberText(now)}`;
  }

  backForm() {
    this.target = this.named("select", "Step to roll back to");
    this.back = this.submit("↶ Roll back");
    this.target.addEventListener("change", () => this.calm());
    const form = this.form(() => this.rollBack(), this.target, this.back);
    form.title = "Weights, optimizer and run go back to this checkpoint after the present step";
    return form;
  }

  // The second click within a few seconds does it.
  rollBack() {
    const value = this.target.value;
    if (!this.armed) {
      this.back.textContent = value === "best" ? "Really, to the best?" : `Really, to step ${value}?`;
      this.back.classList.add("artnb-armed");
      this.armed = setTimeout(() => this.calm(), 1000 * CONFIRM_SECONDS);
      return;
    }
    this.calm();
    this.ask("roll_back", value === "best" ? value : Number(value));
  }

  calm() {
    clearTimeout(this.armed);
    this.armed = 0;
    this.back.textContent = "↶ Roll back";
    this.back.classList.remove("artnb-armed");
  }

  noteForm(note) {
    const input = this.named("input", "Note for the run's journal");
    input.placeholder = "note";
    return this.form(() => { note(input.value); input.value = ""; }, input, this.submit("Add note"));
  }

  say(text) {
    this.answer.textContent = text;
    clearTimeout(this.saying);
    this.saying = setTimeout(() => { this.answer.textContent = ""; }, 1000 * SAYING_SECONDS);
  }

  update(head) {
    const { paused, stop } = (this.controls = head.controls);
    const isRunning = head.status === "running", isOpen = isRunning || head.status === "idle";
    this.stop.disabled = stop || !isRunning;
    this.pause.disabled = stop || !isRunning;
    this.pause.textContent = paused ? "▶ Go on" : "‖ Pause";
    this.setButton.disabled = !isOpen;
    this.fill(this.setting, Object.entries(head.settings).map(([name, words]) => [name, name in head.controls.settings ? `${words} = ${numberText(head.controls.settings[name])}` : words]));
    this.placeholder();
    const known = head.checkpoints, best = head.best && known.includes(head.best.step) ? ` (step ${head.best.step})` : "";
    this.fill(this.target, known.length ? [["best", `best${best}`], ...known.map((step) => [String(step), `step ${step}`]).reverse()] : []);
    this.back.disabled = !isOpen || !known.length || head.controls.roll_back !== null;
  }

  // Options that stay the same stay: an open list does not close under somebody's pointer.
  fill(select, options) {
    const key = JSON.stringify(options);
    if (select.dataset.key === key) return;
    const before = select.value;
    select.dataset.key = key;
    select.replaceChildren(...options.map(([value, words]) => { const option = make("option", "", words); option.value = value; return option; }));
    if (options.some(([value]) => value === before)) select.value = before;
    select.disabled = !options.length;
  }
}
