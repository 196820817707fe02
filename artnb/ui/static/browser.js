// What does a view of trajectories do? A table to filter and sort, and beside it what was opened.
// The other browser_*.js stand before this in the same module.

const SAY_SECONDS = 5, LATE_SECONDS = 1.5, FIRST_TAB = "chat";
const KEYS = [["↑ ↓ or j k", "move through the table"], ["Enter", "open, or fold and unfold"], ["→ ←", "unfold, fold"], ["Space", "select, for comparison or export"], ["c", "compare what is selected"], ["/", "go to the filter"], ["Esc", "close what is open"], ["[ ]", "previous, next trajectory"]];

class Page {
  constructor(root, kernel, view) {
    this.root = root;
    this.kernel = kernel;
    this.view = view;
    this.ask = (what, asked) => kernel.ask(what, asked);
    this.past = [];
    this.said = 0;
    root.classList.add("artnb-browse");
    root.setAttribute("role", "region");
    root.setAttribute("aria-label", "Trajectory browser");
    root.setAttribute("data-lm-suppress-shortcuts", "true"); // or JupyterLab takes j, k, c and d for its cells
    root.hidden = true; // until there is something to show: a static view may stand in for us
    this.table = new Table(this);
    this.build();
    this.endTheme = followTheme(root);
    root.addEventListener("keydown", (event) => this.key(event));
    this.clock = setInterval(() => this.tick(), 500);
  }

  build() {
    this.name = el("h3", { class: "ab-heading" }, "…");
    this.about = el("span", { class: "ab-quiet" });
    this.state = el("span", { class: "ab-state" });
    this.late = el("span", { class: "ab-late", hidden: true }, "… waiting for the kernel");
    const whole = button("⤢", () => (document.fullscreenElement ? document.exitFullscreen() : this.root.requestFullscreen()), { title: "Full screen", "aria-label": "Full screen" });
    this.fresh = button("", () => { this.fresh.hidden = true; this.table.requery({ toTop: false }); }, { class: "ab-fresh", hidden: true });
    const top = el("header", { class: "ab-top" }, this.name, this.state, this.about, this.fresh, el("span", { class: "ab-push" }), this.late, whole);
    this.status = el("div", { class: "ab-hidden", role: "status", "aria-live": "polite" });
    this.left = el("section", { class: "ab-left", "aria-label": "Table" }, this.buildToolbar(), this.buildBelow(), el("div", { class: "ab-stage" }, this.table.element, this.chosen));
    this.right = el("section", { class: "ab-right", "aria-label": "What is open", tabindex: "-1", hidden: true });
    this.split = el("div", { class: "ab-split" }, this.left, this.right);
    this.root.append(top, this.split, this.status);
  }

  buildToolbar() {
    this.filter = el("input", { type: "search", class: "ab-filter", placeholder: "Filter, for example reward<0.5 tool:search", "aria-label": "Filter trajectories", spellcheck: "false", autocomplete: "off" });
    this.helping = new Menu("?", "What may be typed here, and the keys", () => this.help());
    this.filter.addEventListener("input", () => { clearTimeout(this.typing); this.typing = setTimeout(() => this.setFilter(this.filter.value), 250); });
    this.filter.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" || event.key === "ArrowDown") { clearTimeout(this.typing); this.setFilter(this.filter.value); }
      if (event.key === "Enter" || event.key === "ArrowDown" || (event.key === "Escape" && !this.filter.value)) { event.preventDefault(); this.table.element.focus(); }
    });
    this.quick = [["✖ failed", "failed"], ["○ unscored", "unscored"], ["★ bookmarked", "bookmark"]].map(([title, term]) => {
      const chip = button(title, () => this.toggleTerm(term), { class: "ab-button ab-toggle", "aria-pressed": "false", title: `Filter: ${term}` });
      chip.term = term;
      return chip;
    });
    this.grouped = button("☰ grouped", () => this.setTree(!this.table.tree), { class: "ab-button ab-toggle", "aria-pressed": "true", title: "Steps › groups › trajectories, or one flat table" });
    return el("div", { class: "ab-bar" }, this.filter, this.helping.element, ...this.quick, this.grouped);
  }

  buildBelow() {
    this.told = el("span", { class: "ab-quiet", role: "status" });
    this.trouble = el("div", { class: "ab-trouble", role: "alert", id: `${this.view}-trouble`, hidden: true });
    this.chosen = el("div", { class: "ab-float ab-chosen", hidden: true });
    this.fold = button("Fold all", () => this.foldAll(false), { class: "ab-link" });
    this.unfoldAll = button("Unfold all", () => this.foldAll(true), { class: "ab-link" });
    this.columns = new Menu("Columns ▾", "Choose columns", () => this.columnChoices());
    const groups = button("▲▼ Best & worst", () => this.showGroups(), { title: "Best and worst of each group of a step, and why a group taught nothing" });
    this.exporting = new Menu("Export ▾", "Write what matches, or what is selected, to a file", (menu) => this.exportForm(menu));
    return el("div", {}, this.trouble, el("div", { class: "ab-line ab-below" }, this.told, this.fold, this.unfoldAll, el("span", { class: "ab-push" }), groups, this.columns.element, this.exporting.element));
  }

  // ---- the run ----

  take(facts) {
    const isFirst = !this.facts, before = this.facts ? this.facts.count : 0;
    this.facts = facts;
    this.root.hidden = false;
    this.name.textContent = facts.name;
    const { indexing } = facts;
    this.state.textContent = indexing !== null ? `… reading the index, ${Math.round(100 * indexing)} %` : facts.is_growing ? "● growing" : facts.kind === "memory" ? "in memory" : "■ at rest";
    this.state.dataset.state = indexing !== null ? "reading" : facts.is_growing ? "growing" : "rest";
    this.about.textContent = [countText(facts.count, "trajectory"), countText(facts.groups, "group"), countText(facts.steps.length, "step"), ...facts.problems.map((problem) => `⚠ ${problem}`)].join(" · ");
    this.table.take(facts);
    this.root.dataset.count = String(facts.count);
    const latest = `step:${facts.steps[facts.steps.length - 1]}`, { expanded } = this.table;
    if (expanded.size === 1 && expanded.has(this.unfolded)) this.table.expanded = new Set([latest]); // still as we left it
    this.unfolded = latest;
    if (isFirst) {
      expanded.add(latest);
      if (facts.groups === 1 || facts.count <= 12) this.table.expanded.add("*");
      this.table.requery();
    } else this.refresh(facts.count - before);
  }

  // New rows come by themselves, but not under somebody's hands.
  refresh(more) {
    const isBusy = this.table.element.matches(":hover, :focus-within") || this.table.selected.size || this.right.contains(document.activeElement);
    if (!isBusy) { this.fresh.hidden = true; return this.table.requery({ toTop: false }); }
    this.more = (this.fresh.hidden ? 0 : this.more) + Math.max(0, more);
    this.fresh.textContent = this.more ? `▲ show ${this.more.toLocaleString("en")} new` : "▲ show what is new";
    this.fresh.hidden = false;
  }

  onquery(query) {
    const isWrong = query.error !== undefined;
    this.filter.setAttribute("aria-invalid", String(isWrong));
    this.filter.toggleAttribute("aria-errormessage", isWrong);
    this.trouble.hidden = !isWrong;
    if (isWrong) {
      const { filter } = this.table, at = query.at;
      this.trouble.replaceChildren(el("b", {}, "⚠ "), query.error);
      if (at !== null && at !== undefined && filter) this.trouble.append(el("div", { class: "ab-mono" }, filter.slice(0, at), el("mark", { class: "ab-differs" }, filter.slice(at) || "∎")));
      return this.say(`Filter not understood: ${query.error}`);
    }
    const share = typeof query.searching === "number" ? ` · searching texts, ${Math.round(100 * query.searching)} % done` : "";
    this.told.textContent = (this.table.filter ? `${countText(query.matched, "trajectory")} of ${this.facts.count.toLocaleString("en")} match` : countText(query.matched, "trajectory")) + share;
    this.table.empty.hidden = query.matched > 0 || Boolean(share);
    this.table.empty.textContent = this.table.filter ? "Nothing matches this filter." : "No trajectory yet: gather writes each one here as it finishes.";
    this.fold.hidden = this.unfoldAll.hidden = !this.table.tree;
    this.root.dataset.matched = String(query.matched);
    this.say(this.told.textContent);
  }

  setFilter(text) {
    if (text === this.table.filter) return;
    this.table.filter = text;
    this.filter.value = text;
    const terms = text.split(/\s+/);
    for (const chip of this.quick) chip.setAttribute("aria-pressed", String(terms.includes(chip.term)));
    if (text && this.table.tree) this.table.expanded.add("*"); // matches are to be seen
    this.table.requery();
  }

  toggleTerm(term) {
    const terms = this.filter.value.split(/\s+/).filter(Boolean), has = terms.includes(term);
    const others = terms.filter((one) => one !== term && !(STATUS[term] && STATUS[one])); // a row has one status
    this.setFilter((has ? others : [...others, term]).join(" "));
  }

  setTree(isTree) {
    this.table.tree = isTree;
    this.grouped.setAttribute("aria-pressed", String(isTree));
    this.table.drawHeader();
    this.table.requery();
  }

  foldAll(isOpen) {
    this.table.expanded = new Set(isOpen ? ["*"] : []);
    this.table.requery();
  }

  onselect(ids) {
    this.chosen.hidden = !ids.length;
    const compare = button(`Compare ${ids.length > MOST_SELECTED ? `(at most ${MOST_SELECTED})` : ""}`.trim(), () => this.compare(ids), { class: "ab-button ab-main", disabled: ids.length < 2 || ids.length > MOST_SELECTED, title: "Side by side, the first difference marked" });
    this.chosen.replaceChildren(el("b", {}, `${ids.length} selected`), compare, button("Clear", () => this.table.unselect(), { class: "ab-link" }));
  }

  columnChoices() {
    const names = { what: "What it is", reward: "Reward", metric: "Metrics", policy: "Policy", person: "A person's" }, groups = new Map();
    for (const column of this.facts.columns) groups.set(column.group, [...(groups.get(column.group) || []), column]);
    return [...groups].map(([group, columns]) => el("fieldset", {}, el("legend", {}, names[group] || group), ...columns.map((column) => {
      const box = el("input", { type: "checkbox", checked: this.table.chosen.includes(column.key) });
      box.addEventListener("change", () => {
        const keys = new Set(this.table.chosen);
        box.checked ? keys.add(column.key) : keys.delete(column.key);
        this.table.choose([...keys]);
      });
      return el("label", {}, box, column.title);
    })));
  }

  exportForm(menu) {
    const ids = [...this.table.selected], ending = { jsonl: "jsonl", parquet: "parquet", sft: "sft.jsonl" };
    const kind = el("select", {}, el("option", { value: "jsonl" }, "JSONL, complete"), el("option", { value: "parquet" }, "parquet, complete"), el("option", { value: "sft" }, "examples for sft_step"));
    const path = el("input", { type: "text", required: true, spellcheck: "false", value: `${this.facts.name}-export.jsonl` });
    kind.addEventListener("change", () => { path.value = path.value.replace(/(\.sft)?\.(jsonl|parquet)$/, `.${ending[kind.value]}`); });
    const what = ids.length ? `${countText(ids.length, "selected trajectory")}` : `all ${countText(this.table.query.matched, "trajectory")} that match`;
    const write = async () => {
      menu.close();
      try {
        const told = await this.ask("export", { ids, query: this.table.query.query, kind: kind.value, path: path.value });
        const left = Object.entries(told.left_out).map(([reason, n]) => `${n} left out: ${reason}`);
        this.told.textContent = [`Wrote ${countText(told.count, "trajectory")} to ${told.path}`, ...left].join("; ");
      } catch (error) {
        this.told.textContent = `⚠ ${error.message}`;
      }
    };
    return el("form", { class: "ab-form", submit: (event) => { event.preventDefault(); write(); } }, el("div", {}, `Export ${what}`), el("label", {}, "As", kind), el("label", {}, "File, beside the notebook", path), el("button", { type: "submit", class: "ab-button ab-main" }, "Write"));
  }

  // The kernel's words on filters; what can be typed becomes a button that types it.
  help() {
    const table = (rows) => el("table", { class: "ab-plain" }, el("tbody", {}, ...rows.map(([left, right]) => el("tr", {}, el("td", {}, left), el("td", {}, right)))));
    const parts = [el("h5", {}, "Filter")], rows = [], words = [];
    for (const line of this.facts ? this.facts.help.split("\n") : []) {
      const example = line.match(/^ {4}(\S.*\S|\S) {3,}(\S.*)$/);
      if (!example) { words.push(line.replace(/``/g, "").replace(/::$/, ":")); continue; }
      if (words.length) parts.push(el("p", { class: "ab-quiet" }, words.splice(0).join(" ")));
      rows.push([example[1].split(/ {2,}/).map((term) => button(term, () => this.type(term), { class: "ab-term", title: "Put this into the filter" })), example[2]]);
    }
    parts.push(table(rows), el("p", { class: "ab-quiet" }, words.join(" ")), el("h5", {}, "Keys"));
    return [...parts, table(KEYS.map(([key, does]) => [el("kbd", {}, key), does]))];
  }

  type(term) {
    this.helping.close();
    this.setFilter(`${this.filter.value.trim()} ${term}`.trim());
    this.filter.focus();
  }

  // ---- what is open ----

  async open(id, isAgain = false, words = "") {
    const turn = this.begin("Opening …");
    const tab = this.detail ? this.detail.tabs.chosen : FIRST_TAB;
    await this.attempt(turn, async () => {
      const told = await this.ask("trajectory", { trajectory: id });
      if (turn !== this.opening) return;
      if (told.missing) return this.show(el("div", { class: "ab-alert" }, `⚠ ${told.missing}`));
      this.detail = new TrajectoryView(this, told, tab);
      this.show(this.detail.element, isAgain ? null : () => this.open(id));
      this.table.opened = id;
      this.table.mark();
      if (words) this.detail.tell(words);
      this.say(`Opened ${told.facts.scenario || id}, reward ${numberText(told.reward)}`);
    });
  }

  reload(words) {
    this.table.requery({ toTop: false });
    return this.open(this.detail.told.id, true, words);
  }

  async compare(ids, titles) {
    const turn = this.begin("Comparing …");
    await this.attempt(turn, async () => {
      const told = await this.ask("compare", { ids });
      if (turn === this.opening) this.show(compareView(told, (id) => this.open(id), titles), () => this.compare(ids, titles));
    });
  }

  async showGroups(step = this.facts.steps[this.facts.steps.length - 1]) {
    if (step === undefined) return;
    const turn = this.begin("Looking through the groups …");
    await this.attempt(turn, async () => {
      const view = await groupsView(this, this.facts.steps, step, (other) => this.showGroups(other));
      if (turn === this.opening) this.show(view, () => this.showGroups(step));
    });
  }

  begin(words) {
    if (this.right.hidden) this.show(el("p", { class: "ab-quiet" }, words));
    return (this.opening = (this.opening || 0) + 1);
  }

  async attempt(turn, act) {
    try {
      await act();
    } catch (error) {
      if (turn === this.opening) this.show(el("div", { class: "ab-alert ab-serious" }, `⚠ ${error.message}`));
    }
  }

  // Show this on the right; again: what brings it back.
  show(element, again) {
    if (again) this.past.push(again);
    const back = this.past.length > 1 ? button("← back", () => { this.past.pop(); const before = this.past.pop(); before(); }, { class: "ab-link" }) : "";
    const close = button("✕ close", () => this.close(), { class: "ab-link", title: "Close (Esc)" });
    this.right.replaceChildren(el("div", { class: "ab-line ab-rightbar" }, back, el("span", { class: "ab-push" }), button("‹ previous", () => this.next(-1), { class: "ab-link", title: "Previous trajectory ([)" }), button("next ›", () => this.next(1), { class: "ab-link", title: "Next trajectory (])" }), close), element);
    this.right.scrollTop = 0;
    this.right.hidden = false;
    this.split.classList.add("ab-two");
    this.table.schedule();
  }

  close() {
    this.opening = (this.opening || 0) + 1;
    this.past = [];
    this.detail = null;
    this.right.hidden = true;
    this.right.replaceChildren();
    this.split.classList.remove("ab-two");
    this.table.opened = null;
    this.table.mark();
    this.table.element.focus({ preventScroll: true });
  }

  // The next trajectory of the table, as far as its rows are here.
  next(step) {
    let index = this.table.active;
    for (const [place, row] of this.table.rows) if (row.key === this.table.opened) index = place;
    for (index += step; index >= 0 && index < this.table.query.count; index += step) {
      const row = this.table.rows.get(index);
      if (!row) return;
      if (row.kind !== "row") continue;
      this.table.moveTo(index);
      return this.open(row.key);
    }
  }

  // ---- the rest ----

  key(event) {
    const isTyping = event.target.matches("input:not([type=checkbox]), textarea, select");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && !this.right.hidden) this.close();
    else if (isTyping) return event.stopPropagation();
    else if (event.key === "/") this.filter.focus();
    else if (event.key === "c" && this.table.selected.size > 1 && this.table.selected.size <= MOST_SELECTED) this.compare([...this.table.selected]);
    else if (event.key === "[" || event.key === "]") this.next(event.key === "]" ? 1 : -1);
    else if (event.key === "?") this.helping.open();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  say(words) {
    this.latest = words;
    const now = performance.now() / 1000;
    if (now - this.said < SAY_SECONDS) return; // tick says the last one later
    this.said = now;
    this.status.textContent = words;
    this.latest = null;
  }

  tick() {
    this.late.hidden = this.kernel.waiting < LATE_SECONDS;
    if (this.latest) this.say(this.latest);
  }

  destroy() {
    this.endTheme();
    this.table.destroy();
    clearInterval(this.clock);
    clearTimeout(this.typing);
  }
}

export default {
  render({ model, el: place }) {
    const view = `ab${Math.random().toString(36).slice(2)}`, root = el("div");
    place.append(root);
    const kernel = new Kernel(model, view), page = new Page(root, kernel, view);
    const hear = (message) => {
      if (message.type === "grown") { if (page.facts) page.take(message.facts); }
      else if (message.type === "trouble") page.told.textContent = `⚠ ${message.text}`;
      else kernel.hear(message);
    };
    model.on("msg:custom", hear);
    model.send({ type: "ready", view });
    kernel.ask("facts").then((facts) => page.take(facts), (error) => { root.hidden = false; page.name.textContent = `⚠ ${error.message}`; });
    return () => {
      model.off("msg:custom", hear);
      page.destroy();
      model.send({ type: "gone", view });
    };
  },
};
