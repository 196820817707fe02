// Where do trajectories part? Two to four of them side by side, and the best and worst of each group.

// told: the kernel's comparison; open(id) shows one of them.
function compareView(told, open, titles) {
  const grid = el("div", { class: "ab-compare", style: `--ab-sides: ${told.columns.length}`, role: "group", "aria-label": "Trajectories side by side" });
  told.columns.forEach((column, side) => {
    const { facts } = column, words = [`step ${facts.step ?? "–"}`, facts.version < 0 ? "base model" : `policy ${facts.version}`, countText(facts.turns || 0, "turn"), countText(facts.tokens || 0, "token")];
    const head = el("div", { class: "ab-side" }, titles && titles[side] ? el("div", { class: "ab-sidetitle" }, titles[side]) : null);
    head.append(el("div", { class: "ab-sidehead" }, rewardBadge(column), el("span", { class: "ab-text" }, facts.scenario || ""), button("open", () => open(column.id), { class: "ab-link" })));
    head.append(el("div", { class: "ab-quiet" }, words.join(" · ")), column.error ? el("div", { class: "ab-warn" }, `✖ ${column.error.type || column.error}`) : "");
    grid.append(head);
  });
  const same = told.common_prefix_entries;
  const box = el("div", { class: "ab-comparison" }, outcomeTable(told, titles), grid);
  if (same) {
    const shared = el("div", { class: "ab-same" }, folded(`${countText(same, "message")} the same in all`, ...told.columns[0].entries.slice(0, same).map((entry) => chatEntry(entry, new Map(), null))));
    grid.append(shared);
  }
  const rest = Math.max(...told.columns.map((column) => column.entries.length));
  for (let index = same; index < rest; index += 1) told.columns.forEach((column, side) => grid.append(comparedEntry(told, column, side, index)));
  if (rest === same) grid.append(el("div", { class: "ab-same ab-quiet" }, "Nothing differs in what was said."));
  return box;
}

function comparedEntry(told, column, side, index) {
  const cell = el("div", { class: "ab-side" }), entry = column.entries[index];
  const parting = told.first_divergence[side], isHere = parting && parting.entry === index;
  if (isHere) cell.append(el("div", { class: "ab-parting" }, "◆ first difference"));
  if (entry) cell.append(chatEntry(entry, new Map(), null, isHere ? parting.at : undefined));
  else if (column.entries.length === index) cell.append(el("div", { class: "ab-quiet" }, "∎ it ends here"));
  return cell;
}

const NOT_OUTCOME = new Set(["id", "note", "bookmark", "attempt", "gather", "parent"]);

function outcomeTable(told, titles) {
  const outcome = told.outcome.filter(({ column }) => !NOT_OUTCOME.has(column));
  if (!outcome.length) return el("p", { class: "ab-quiet" }, "Their outcomes are the same.");
  const rows = outcome.map(({ column, title, values }) => {
    const numbers = values.filter((value) => typeof value === "number"), most = Math.max(...numbers), isSpread = new Set(numbers.map(numberText)).size > 1;
    const cells = values.map((value) => {
      const isMost = typeof value === "number" && isSpread && value === most;
      return el("td", { class: isMost ? "ab-most" : "" }, typeof value === "number" ? `${numberText(value)}${isMost ? " ▲" : ""}` : value === null ? "–" : String(value));
    });
    return el("tr", {}, el("th", { scope: "row" }, (title || column).replace(/^(reward|metric)\//, "")), ...cells);
  });
  const head = told.columns.map((column, side) => el("th", { scope: "col" }, (titles && titles[side]) || (told.columns.length === 2 ? ["left", "right"][side] : String(side + 1))));
  const box = folded(`Outcome: ${countText(rows.length, "difference")}`, el("div", { class: "ab-scroll" }, el("table", { class: "ab-plain" }, el("thead", {}, el("tr", {}, el("th", {}), ...head)), el("tbody", {}, ...rows))));
  box.open = true;
  return box;
}

function rewardBadge({ reward, error }) {
  const words = error ? "✖ failed" : reward === null || reward === undefined ? "○ unscored" : numberText(reward);
  return el("span", { class: "ab-badge", title: "reward" }, words);
}

// Best and worst of each group of a step. page: {ask, open(id), compare(ids, titles)}
async function groupsView(page, steps, step, again) {
  const groups = await page.ask("extremes", { step });
  const pick = el("select", { "aria-label": "Step", change: () => again(Number(pick.value)) }, [...steps].reverse().map((one) => el("option", { value: one, selected: one === step }, `step ${one}`)));
  const rows = groups.map((group) => {
    const both = group.best && group.worst && group.best !== group.worst;
    return el("tr", {},
      el("th", { scope: "row", class: "ab-wide" }, group.scenario || group.group, group.seat ? el("span", { class: "ab-quiet" }, ` · ${group.seat}`) : null, group.split !== "train" ? el("span", { class: "ab-quiet" }, ` · ${group.split}`) : null),
      el("td", { class: "ab-number" }, String(group.count)),
      el("td", { class: "ab-number" }, numberText(group.mean)),
      el("td", {}, group.best ? button("▲ best", () => page.open(group.best)) : "–"),
      el("td", {}, group.worst && both ? button("▼ worst", () => page.open(group.worst)) : "–"),
      el("td", {}, both ? button("compare", () => page.compare([group.best, group.worst], ["best of its group", "worst of its group"])) : ""),
      el("td", { class: "ab-wide" }, group.skipped ? `◌ taught nothing: ${group.skipped}` : "◐ it taught"));
  });
  const head = ["scenario", "rollouts", "mean reward", "best", "worst", "", "what it taught"].map((title) => el("th", { scope: "col" }, title));
  const table = el("table", { class: "ab-plain" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  return el("div", {}, el("div", { class: "ab-line" }, el("b", {}, "Best and worst of each group"), pick), el("div", { class: "ab-scroll" }, table), rows.length ? null : el("p", { class: "ab-quiet" }, "No group at this step."));
}
