// Which trajectories are there? A table of which only the visible rows exist, however many match.

const ROW = 27, PAGE = 100, MOST_SELECTED = 4;
const NAME_WIDTH = 250, LEAST_HEIGHT = 400;
const WIDTHS = { number: [66, 0.5], text: [110, 1], flag: [60, 0.3], status: [104, 0.7], id: [130, 0.6], reward: [90, 0.7] };
const FIRST_CHOICE = ["status", "reward", "turns", "tokens", "seconds"];

// A path's end says more than its beginning, which all share.
const shortName = (name) => (name.length > 26 && /^[\w./-]+$/.test(name) && name.includes("/") ? `…/${name.split("/").pop()}` : name);
const shortTitle = (column) => (column.key === "tokens" ? "tokens" : column.title.replace(/^(reward|metric)\//, ""));

class Table {
  // page: {ask(what, asked), open(id), say(text), onquery(query), onselect(ids)}
  constructor(page) {
    this.page = page;
    this.sort = [["step", "desc"]];
    this.tree = true;
    this.filter = "";
    this.expanded = new Set();
    this.selected = new Set();
    this.query = { query: null, count: 0, matched: 0 };
    this.rows = new Map();
    this.asked = new Set();
    this.drawn = new Map();
    this.active = 0;
    this.opened = null;
    this.turn = 0;
    this.low = 0; // of the rewards seen so far, for the bars behind them
    this.high = 0;
    this.header = el("div", { class: "ab-row ab-header", role: "row" });
    this.body = el("div", { class: "ab-rows", role: "rowgroup" });
    this.empty = el("div", { class: "ab-empty", hidden: true });
    this.inner = el("div", { class: "ab-inner" }, this.header, this.body);
    this.element = el("div", { class: "ab-table", tabindex: "0", role: "treegrid", "aria-label": "Trajectories", "aria-multiselectable": "true", "data-lm-suppress-shortcuts": "true" }, this.inner, this.empty);
    this.element.addEventListener("scroll", () => this.schedule());
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.click(event));
    this.sizes = new ResizeObserver(() => this.schedule());
    this.sizes.observe(this.element);
  }

  take(facts) {
    const known = new Set(facts.columns.map((column) => column.key));
    this.columns = new Map(facts.columns.map((column) => [column.key, column]));
    if (!this.chosen) {
      const parts = facts.columns.filter((column) => column.key.startsWith("reward/")).slice(0, 3).map((column) => column.key);
      this.chosen = FIRST_CHOICE.filter((key) => known.has(key));
      this.chosen.splice(this.chosen.indexOf("reward") + 1, 0, ...parts);
    }
    this.chosen = this.chosen.filter((key) => known.has(key));
    this.drawHeader();
  }

  choose(keys) {
    this.chosen = keys;
    this.drawHeader();
    this.redraw();
  }

  get shownColumns() {
    return this.chosen.map((key) => this.columns.get(key));
  }

  // ---- asking ----

  // Ask anew; what is shown stays until the first rows are there.
  async requery({ toTop = true } = {}) {
    const turn = (this.turn += 1);
    let query;
    try {
      query = await this.page.ask("query", { filter: this.filter, sort: this.sort, tree: this.tree, expanded: [...this.expanded] });
    } catch (error) {
      query = { error: error.message, at: null };
    }
    if (turn !== this.turn) return;
    if (query.error !== undefined) return this.page.onquery(query);
    if (toTop) { this.element.scrollTop = 0; this.active = 0; }
    const start = PAGE * Math.floor(this.first / PAGE);
    const page = query.count ? await this.askPage(query.query, start) : { rows: [] };
    if (turn !== this.turn || page.error) return;
    this.query = query;
    this.rows = new Map();
    this.asked = new Set([start]);
    this.keep(start, page.rows);
    this.active = Math.min(this.active, Math.max(0, query.count - 1));
    this.page.onquery(query);
    this.redraw();
    if (typeof query.searching === "number") this.watch(query, turn);
  }

  askPage(query, start) {
    return this.page.ask("page", { query, start, count: PAGE }).catch((error) => ({ error: error.message }));
  }

  // A search through texts goes on in the kernel: show what it has found so far.
  async watch(query, turn) {
    while (typeof query.searching === "number") {
      await new Promise((done) => setTimeout(done, 400));
      if (turn !== this.turn) return;
      query = await this.page.ask("progress", { query: query.query }).catch((error) => ({ error: error.message }));
      if (turn !== this.turn || query.error) return;
      this.query = query;
      this.asked = new Set();
      this.page.onquery(query);
      this.redraw();
    }
  }

  keep(start, rows) {
    rows.forEach((row, index) => {
      this.rows.set(start + index, row);
      if (Number.isFinite(row.reward)) {
        this.low = Math.min(this.low, row.reward);
        this.high = Math.max(this.high, row.reward);
      }
    });
  }

  async load(start) {
    if (this.asked.has(start)) return;
    this.asked.add(start);
    const query = this.query.query, page = await this.askPage(query, start);
    if (query !== this.query.query) return;
    if (page.error) { // forgotten in the meantime: ask the whole question again
      if (!this.isAsking) { this.isAsking = true; await this.requery({ toTop: false }); this.isAsking = false; }
      return;
    }
    this.keep(start, page.rows);
    this.redraw();
  }

  // ---- drawing ----

  get first() {
    return Math.max(0, Math.floor(this.element.scrollTop / ROW) - 2);
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  redraw() {
    this.drawn.clear();
    this.body.replaceChildren();
    this.draw();
  }

  draw() {
    const height = Math.max(this.element.clientHeight, LEAST_HEIGHT); // it is 0 while a page is being laid out anew
    const { count } = this.query, last = Math.min(count, this.first + Math.ceil(height / ROW) + 4);
    this.body.style.height = `${count * ROW}px`;
    this.element.setAttribute("aria-rowcount", String(count + 1));
    this.element.setAttribute("role", this.tree ? "treegrid" : "grid");
    for (const [index, element] of this.drawn) {
      if (index >= this.first && index < last) continue;
      element.remove();
      this.drawn.delete(index);
    }
    const starts = new Set();
    for (let index = this.first; index < last; index += 1) {
      const row = this.rows.get(index);
      if (!row || !this.asked.has(PAGE * Math.floor(index / PAGE))) starts.add(PAGE * Math.floor(index / PAGE));
      if (this.drawn.has(index)) continue;
      const element = this.row(row, index);
      element.style.transform = `translateY(${index * ROW}px)`;
      this.drawn.set(index, element);
      this.body.append(element);
    }
    this.mark();
    if (!starts.size) return;
    clearTimeout(this.later);
    this.later = setTimeout(() => starts.forEach((start) => this.load(start)), 60); // not every page of a long drag
  }

  mark() {
    for (const [index, element] of this.drawn) {
      const row = this.rows.get(index);
      element.classList.toggle("ab-active", index === this.active);
      element.classList.toggle("ab-opened", Boolean(row) && row.kind === "row" && row.key === this.opened);
      const isSelected = Boolean(row) && this.selected.has(row.key);
      element.setAttribute("aria-selected", String(isSelected));
      const box = element.querySelector("input");
      if (box) box.checked = isSelected;
    }
    const active = this.drawn.get(this.active);
    if (active) this.element.setAttribute("aria-activedescendant", active.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  drawHeader() {
    const widths = [`minmax(${NAME_WIDTH}px, 2fr)`];
    let least = NAME_WIDTH;
    for (const column of this.shownColumns) {
      const [usual, share] = WIDTHS[column.key] || WIDTHS[column.kind] || WIDTHS.text;
      const width = Math.max(usual, Math.min(170, 30 + 7 * shortTitle(column).length));
      widths.push(`minmax(${width}px, ${share}fr)`);
      least += width;
    }
    this.inner.style.setProperty("--ab-columns", widths.join(" "));
    this.inner.style.minWidth = `${least}px`;
    const name = this.tree ? "step › scenario › trajectory" : "scenario";
    this.header.replaceChildren(this.headCell({ key: this.tree ? "step" : "scenario", title: name, kind: "text" }), ...this.shownColumns.map((column) => this.headCell(column)));
  }

  headCell(column) {
    const place = this.sort.findIndex(([key]) => key === column.key), direction = place < 0 ? null : this.sort[place][1];
    const sign = direction ? (direction === "asc" ? " ▲" : " ▼") + (this.sort.length > 1 ? String(place + 1) : "") : "";
    const cell = el("div", { class: `ab-cell ab-${column.kind}`, role: "columnheader", "aria-sort": { asc: "ascending", desc: "descending" }[direction] || "none" });
    cell.append(el("button", { type: "button", class: "ab-sort", tabindex: "-1", title: `Sort by ${column.title}; shift-click adds it to the sort`, click: (event) => this.sortBy(column, event.shiftKey) }, `${shortTitle(column)}${sign}`));
    return cell;
  }

  sortBy(column, isAdded) {
    const before = this.sort.find(([key]) => key === column.key);
    const order = column.kind === "text" ? ["asc", "desc", null] : ["desc", "asc", null];
    const next = before ? order[order.indexOf(before[1]) + 1] : order[0];
    const others = isAdded ? this.sort.filter(([key]) => key !== column.key) : [];
    this.sort = next ? [...others, [column.key, next]] : others;
    this.drawHeader();
    this.page.say(next ? `Sorted by ${column.title}, ${next === "asc" ? "lowest" : "highest"} first` : "Not sorted");
    this.requery();
  }

  row(row, index) {
    const element = el("div", { class: "ab-row", role: "row", id: `${this.page.view}-r${index}`, "aria-rowindex": index + 2 });
    element.rowIndex = index;
    if (!row) {
      element.append(el("div", { class: "ab-cell ab-quiet", role: "gridcell" }, "…"));
      return element;
    }
    element.classList.add(`ab-${row.kind}`);
    if (this.tree) element.setAttribute("aria-level", String(row.level + 1));
    if (row.kind !== "row") element.setAttribute("aria-expanded", String(row.open));
    element.append(this.nameCell(row), ...this.shownColumns.map((column) => this.cell(row, column)));
    return element;
  }

  nameCell(row) {
    const cell = el("div", { class: "ab-cell ab-name", role: "gridcell", style: `padding-left: ${8 + 17 * row.level}px` });
    if (row.kind === "row") {
      const words = this.tree ? [row.seat || "", row.id || row.key].filter(Boolean).join(" · ") : shortName(row.scenario || row.id);
      const box = el("input", { type: "checkbox", tabindex: "-1", "aria-label": "Select for comparison or export" });
      const mark = row.bookmark ? el("span", { class: "ab-star", title: row.note ? `Bookmarked: ${row.note}` : "Bookmarked" }, "★ ") : "";
      cell.append(box, el("span", { class: this.tree ? "ab-text ab-mono" : "ab-text", title: this.tree ? words : row.scenario || row.id }, mark, words));
    } else {
      const count = countText(row.trajectories, "rollout");
      cell.append(el("span", { class: "ab-twist", "aria-hidden": "true" }, row.open ? "▾" : "▸"));
      cell.append(el("span", { class: "ab-text", title: row.title }, shortName(row.title)), el("span", { class: "ab-quiet ab-count" }, count));
      if (row.skipped) cell.append(el("span", { class: "ab-skipped", title: `Taught nothing: ${row.skipped}` }, `◌ ${row.skipped}`));
    }
    return cell;
  }

  cell(row, column) {
    const value = row[column.key], cell = el("div", { class: `ab-cell ab-${column.kind}`, role: "gridcell" });
    if (value === null || value === undefined || value === "") return cell;
    if (column.key === "status") {
      if (row.kind !== "row" && value === "scored") return cell;
      const words = row.error ? `${STATUS[value] || ""} ${row.error}` : statusText(value);
      cell.classList.add(`ab-is-${String(value).replace(" ", "-")}`);
      cell.append(el("span", { class: "ab-text", title: words }, words));
    } else if (column.key === "reward" && typeof value === "number") {
      const share = this.high > this.low ? Math.max(0, Math.min(1, (value - this.low) / (this.high - this.low))) : 0;
      cell.append(el("span", { class: "ab-bar", style: `--ab-share: ${Math.round(100 * share)}%`, "aria-hidden": "true" }), el("span", { class: "ab-value" }, `${row.kind === "row" && Number.isFinite(row.override) ? "✎ " : ""}${numberText(value)}`));
    } else if (column.key === "seconds") cell.append(secondsText(value));
    else if (column.kind === "flag") cell.append(value === true ? "✓" : value === false ? "" : numberText(value));
    else if (typeof value === "number") cell.append(numberText(value));
    else cell.append(el("span", { class: "ab-text", title: String(value) }, String(value)));
    return cell;
  }

  // ---- a person's hands ----

  click(event) {
    const element = event.target.closest(".ab-row");
    if (!element || element.rowIndex === undefined) return;
    const row = this.rows.get(element.rowIndex);
    this.active = element.rowIndex;
    if (!row) return;
    if (event.target.matches("input") || event.ctrlKey || event.metaKey) this.select(row);
    else this.enter(row);
    this.mark();
  }

  enter(row) {
    if (row.kind === "row") this.page.open(row.key);
    else this.unfold(row, !row.open);
  }

  unfold(row, isOpen) {
    if (row.kind === "row" || row.open === isOpen) return;
    isOpen ? this.expanded.add(row.key) : this.expanded.delete(row.key);
    this.requery({ toTop: false });
  }

  select(row) {
    if (row.kind !== "row") return;
    this.selected.has(row.key) ? this.selected.delete(row.key) : this.selected.add(row.key);
    this.mark();
    this.page.onselect([...this.selected]);
  }

  unselect() {
    this.selected.clear();
    this.mark();
    this.page.onselect([]);
  }

  key(event) {
    if (event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey) return;
    const row = this.rows.get(this.active), screen = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: screen, PageUp: -screen, Home: -Infinity, End: Infinity };
    if (event.key in moves) this.moveTo(this.active + moves[event.key]);
    else if (event.key === "Enter" && row) this.enter(row);
    else if (event.key === " " && row) this.select(row);
    else if (event.key === "ArrowRight" && row) this.unfold(row, true);
    else if (event.key === "ArrowLeft" && row) this.outward(row);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Fold what is open; else go to what it belongs to.
  outward(row) {
    if (row.open) return this.unfold(row, false);
    for (let index = this.active - 1; index >= 0; index -= 1) {
      const other = this.rows.get(index);
      if (!other) return;
      if (other.level < row.level) return this.moveTo(index);
    }
  }

  moveTo(index) {
    this.active = Math.max(0, Math.min(this.query.count - 1, index));
    const top = this.active * ROW, head = this.header.offsetHeight, height = this.element.clientHeight - head;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + ROW > this.element.scrollTop + height) this.element.scrollTop = top + ROW - height;
    this.draw();
  }

  destroy() {
    this.sizes.disconnect();
    clearTimeout(this.later);
    if (this.waiting) cancelAnimationFrame(this.waiting);
    this.turn += 1;
  }
}
