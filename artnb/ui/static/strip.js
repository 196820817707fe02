// Which groups are solved, and which teach nothing? A column a step, a cell a group, a sign in each cell.

const SIGNS = { teaches: "◐", solved: "●", equal: "○", unscored: "×" };
const WORDS = {
  teaches: "rewards differ: it teaches",
  solved: "all equal at the highest reward: solved, teaches nothing",
  equal: "all equal: teaches nothing",
  unscored: "no rollout was scored",
};
const MOST_COLUMNS = 60;

class Strip {
  constructor() {
    this.element = make("section", "artnb-strip-box");
    const keys = make("div", "artnb-strip-keys");
    for (const [mark, sign] of Object.entries(SIGNS)) keys.append(make("span", "", `${sign} ${WORDS[mark]}`));
    this.strip = make("div", "artnb-strip");
    this.strip.tabIndex = 0;
    this.strip.setAttribute("role", "group");
    this.strip.setAttribute("aria-label", "Groups by step; arrow keys read them one by one");
    this.reading = make("div", "artnb-strip-reading");
    this.element.append(make("h4", "", "Groups: a column a step, the highest mean reward on top; darker is higher"), keys, this.strip, this.reading);
    this.strip.addEventListener("keydown", (event) => this.key(event));
    this.strip.addEventListener("pointerover", (event) => this.readCell(event.target));
    this.strip.addEventListener("click", (event) => this.readCell(event.target));
    this.columns = [];
    this.drawn = new Map();
    this.place = null;
    this.isChosen = false; // until then the reading sums the latest step up
  }

  update(rows) {
    this.element.hidden = !rows.length;
    const latest = rows.slice(-MOST_COLUMNS);
    const means = latest.flatMap((row) => row.cells.map((cell) => cell.mean)).filter((mean) => mean !== null);
    const low = Math.min(...means), span = Math.max(...means) - low || 1;
    const range = `${low}/${span}`;
    const kept = new Map();
    this.columns = latest;
    const columns = latest.map((row) => {
      const before = this.drawn.get(row.step);
      const column = before && before.row === row && before.range === range ? before : { row, range, element: this.column(row, low, span) };
      kept.set(row.step, column);
      return column.element;
    });
    const isAtEnd = this.strip.scrollLeft + this.strip.clientWidth >= this.strip.scrollWidth - 20;
    this.strip.replaceChildren(...columns);
    this.drawn = kept;
    if (isAtEnd) this.strip.scrollLeft = this.strip.scrollWidth;
    if (!this.isChosen && latest.length) this.reading.textContent = this.summary(latest[latest.length - 1]);
  }

  summary(row) {
    const names = (mark) => row.cells.filter((cell) => cell.mark === mark).map((cell) => cell.name).slice(-5);
    const counts = Object.keys(SIGNS).map((mark) => [mark, row.cells.filter((cell) => cell.mark === mark).length]).filter(([, n]) => n);
    const said = counts.map(([mark, n]) => `${n} ${SIGNS[mark]}`).join(", ");
    const solved = names("solved").length ? `; solved: ${names("solved").join(", ")}` : "";
    return `Step ${row.step}: ${said}${solved}`;
  }

  column(row, low, span) {
    const column = make("div", "artnb-column");
    [...row.cells].reverse().forEach((cell) => {
      const element = make("span", "artnb-cell", SIGNS[cell.mark] || "?");
      const share = cell.mean === null ? 0 : (cell.mean - low) / span;
      element.style.setProperty("--artnb-share", `${Math.round(8 + 72 * share)}%`);
      element.title = this.words(row, cell);
      column.append(element);
    });
    if (row.hidden) column.append(make("span", "artnb-more", `+${row.hidden}`));
    column.append(make("span", "artnb-column-name", String(row.step)));
    return column;
  }

  words(row, cell) {
    const failed = cell.failed ? `, ${cell.failed} failed` : "";
    const rewards = cell.mean === null ? "" : ` mean ${numberText(cell.mean)} (${numberText(cell.low)} to ${numberText(cell.high)})`;
    return `Step ${row.step}, ${cell.name}: ${cell.n} rollouts${failed},${rewards} ${SIGNS[cell.mark]} ${WORDS[cell.mark]}`;
  }

  readCell(target) {
    if (!target.classList || !target.classList.contains("artnb-cell")) return;
    if (!this.isChosen) this.reading.setAttribute("role", "status"); // a person asks: read it out from now on
    this.isChosen = true;
    this.reading.textContent = target.title;
  }

  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in moves) || !this.columns.length) return;
    event.preventDefault();
    event.stopPropagation();
    const [dx, dy] = moves[event.key];
    const last = this.columns.length - 1;
    const [x, y] = this.place || [last - dx, -dy];
    const column = Math.min(last, Math.max(0, x + dx));
    const cells = this.strip.children[column].querySelectorAll(".artnb-cell");
    const row = Math.min(cells.length - 1, Math.max(0, y + dy));
    this.place = [column, row];
    this.strip.querySelectorAll(".artnb-chosen").forEach((cell) => cell.classList.remove("artnb-chosen"));
    if (!cells[row]) return;
    cells[row].classList.add("artnb-chosen");
    cells[row].scrollIntoView({ block: "nearest", inline: "nearest" });
    this.readCell(cells[row]);
  }
}
