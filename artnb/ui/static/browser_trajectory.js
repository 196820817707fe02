// What is one trajectory? Its outcome on top, what can be done with it, and tabs for all the rest.

// page: {ask, open, compare, say, facts, root, view, reload(), copy(text, what)}
class TrajectoryView {
  constructor(page, told, tab) {
    this.page = page;
    this.told = told;
    this.sheet = el("div", { class: "ab-sheet", role: "status" });
    this.tabs = new Tabs("About this trajectory", this.parts(), tab);
    this.element = el("div", { class: "ab-trajectory" }, this.head(), this.sheet, this.alerts(), this.tabs.element);
  }

  ask(what, asked) {
    return this.page.ask(what, { trajectory: this.told.id, ...asked });
  }

  head() {
    const { told } = this, { facts } = told;
    const words = [`step ${facts.step ?? "–"}`, facts.split, facts.version === null || facts.version === undefined ? null : facts.version < 0 ? "base model" : `policy ${facts.version}`, facts.seat, countText(facts.turns || 0, "turn"), countText(facts.tokens || 0, "sampled token"), facts.seconds ? secondsText(facts.seconds) : null];
    const title = el("div", { class: "ab-titleline" }, el("h4", { class: "ab-title" }, facts.scenario || "trajectory"), el("span", { class: "ab-quiet" }, words.filter(Boolean).join(" · ")), el("code", { class: "ab-quiet" }, told.id));
    const badge = rewardBadge(told);
    const parts = Object.entries(told.parts).map(([name, value]) => el("span", { class: "ab-chip" }, `${name} `, el("b", {}, numberText(value))));
    const line = el("div", { class: "ab-line" }, el("span", { class: "ab-quiet" }, "reward"), badge);
    if (facts.advantage !== null && facts.advantage !== undefined) line.append(el("span", { class: "ab-chip" }, "advantage ", el("b", {}, signed(facts.advantage))));
    line.append(...parts, el("span", { class: "ab-push" }), ...this.actions());
    return el("header", {}, title, line, this.siblings());
  }

  siblings() {
    const rank = (one) => (one.status === "failed" || one.reward === null ? -Infinity : one.reward);
    const all = [...this.told.siblings].sort((a, b) => rank(b) - rank(a) || 0);
    if (all.length < 2) return "";
    const buttons = all.map((one) => button(one.status === "failed" ? "✖" : one.reward === null ? "○" : numberText(one.reward), () => this.page.open(one.id), { class: "ab-sibling", "aria-current": one.is_self ? "true" : null, title: one.is_self ? "this one" : `Open ${one.id}` }));
    return el("nav", { class: "ab-line ab-siblings", "aria-label": "Its group" }, el("span", { class: "ab-quiet" }, `group of ${all.length}`), ...buttons);
  }

  alerts() {
    const { told } = this, box = el("div", {});
    const say = (className, ...words) => box.append(el("div", { class: `ab-alert ${className}` }, ...words));
    if (told.rolled_back) say("", "↶ This step was rolled back: the trajectory is kept, and counts no more.");
    if (told.override) say("", `✎ A person set the reward to ${numberText(told.override.reward)} (it was ${numberText(told.override.was)}): `, told.override.reason || "no reason given");
    if (told.bookmark) say("", `★ Bookmarked${told.bookmark.note ? ": " : ""}`, told.bookmark.note || "");
    if (told.skipped) say("", `◌ Its group taught nothing: ${told.skipped}`);
    if (told.error) {
      const trace = told.error.traceback ? folded("Traceback", el("div", { class: "ab-code" }, told.error.traceback)) : "";
      say("ab-serious", el("b", {}, `✖ ${told.error.type}: `), told.error.message, trace);
    }
    return box;
  }

  // ---- what can be done ----

  actions() {
    const { told, page } = this, ranked = told.siblings.filter((one) => one.reward !== null && one.status !== "failed").sort((a, b) => b.reward - a.reward);
    const against = (other, title) => () => page.compare([told.id, other], ["this one", title]);
    const others = ranked.filter((one) => !one.is_self);
    const compare = new Menu("Compare ▾", "Put it beside another one", (menu) => {
      const list = [];
      if (others.length) list.push(button("with the best of its group", against(others[0].id, "best of the group")), button("with the worst of its group", against(others[others.length - 1].id, "worst of the group")));
      list.push(button("with the same scenario at the first step", () => this.sameScenario("first")), button("with the same scenario at the last step", () => this.sameScenario("last")));
      list.push(button("first step against last step", () => this.sameScenario("both")));
      list.forEach((one) => one.addEventListener("click", () => menu.close()));
      return list;
    });
    const copy = new Menu("Copy ▾", "Copy it in another form", (menu) => [
      button("as messages", () => { menu.close(); this.copy("messages", { history: 0 }); }),
      button("as JSON", () => { menu.close(); this.copy("json"); }),
      button("its last turn as curl", () => { menu.close(); this.copy("curl", { turn: -1 }); }),
    ]);
    const star = new Menu(told.bookmark ? "★ Bookmarked" : "☆ Bookmark", "Keep it with a note", (menu) => this.bookmarkForm(menu));
    const score = new Menu("✎ Override", "Give it a reward of your own", (menu) => this.overrideForm(menu));
    return [compare.element, copy.element, star.element, score.element];
  }

  tell(words, isTrouble) {
    this.sheet.replaceChildren(el("span", { class: isTrouble ? "ab-warn" : "ab-quiet" }, `${isTrouble ? "⚠ " : ""}${words}`));
  }

  async attempt(act) {
    try {
      return await act();
    } catch (error) {
      this.tell(error.message, true);
      return null;
    }
  }

  copy(what, asked) {
    return this.attempt(async () => {
      const text = await this.ask(what, asked), isCopied = await toClipboard(text, this.sheet);
      if (isCopied) this.tell(`Copied ${text.length.toLocaleString("en")} characters.`);
    });
  }

  sameScenario(which) {
    return this.attempt(async () => {
      const same = await this.ask("same_scenario"), { first, last } = same;
      const when = (id) => { const step = same.steps.find((one) => one.ids.includes(id)); return step ? `step ${step.step}` : ""; };
      const pair = which === "both" ? [first, last] : [this.told.id, same[which]];
      if (!pair[0] || !pair[1] || pair[0] === pair[1]) return this.tell("This scenario was not played at another step.", true);
      return this.page.compare(pair, which === "both" ? pair.map(when) : ["this one", when(pair[1])]);
    });
  }

  // A form of a menu: fields, and buttons that end it.
  form(menu, fields, act, word, ...others) {
    const submit = el("button", { type: "submit", class: "ab-button ab-main" }, word);
    return el("form", { class: "ab-form", submit: (event) => { event.preventDefault(); menu.close(); act(); } }, ...fields, el("div", { class: "ab-line" }, submit, ...others));
  }

  bookmarkForm(menu) {
    const note = el("input", { type: "text", maxlength: "2000", value: this.told.bookmark ? this.told.bookmark.note || "" : "" });
    const keep = (words) => this.attempt(async () => { await this.ask("bookmark", { note: words }); this.page.reload(); });
    const remove = this.told.bookmark ? button("Remove", () => { menu.close(); keep(null); }) : "";
    return this.form(menu, [el("label", {}, "Note (may be empty)", note)], () => keep(note.value), "Keep", remove);
  }

  overrideForm(menu) {
    const { told } = this;
    const reward = el("input", { type: "number", step: "any", required: true, value: told.reward ?? "" }), why = el("input", { type: "text", required: true, maxlength: "2000" });
    const set = (value, words) => this.attempt(async () => {
      const answer = await this.ask("override", { reward: value, why: words });
      this.page.reload(answer.kept === "memory" ? "Kept in this kernel only: another process writes the run, or none does." : "");
    });
    const back = told.override ? button("Take back", () => { menu.close(); set(null, "taken back"); }) : "";
    return this.form(menu, [el("label", {}, "Reward", reward), el("label", {}, "Reason", why)], () => set(Number(reward.value), why.value), "Set", back);
  }

  replay(turn, box) {
    box.querySelectorAll(".ab-replay").forEach((old) => old.remove());
    const place = el("div", { class: "ab-replay" }, el("span", { class: "ab-quiet" }, "Sampling this turn anew …"));
    box.append(place);
    this.ask("replay", { turn }).then((told) => {
      const entries = told.entries.filter((entry) => entry.sampled), entry = entries[entries.length - 1] || told.entries[told.entries.length - 1];
      place.replaceChildren(el("div", { class: "ab-line" }, el("b", {}, "↻ replayed with the current policy"), button("open", () => this.page.open(told.id), { class: "ab-link" }), button("compare", () => this.page.compare([this.told.id, told.id], ["this one", "replayed"]), { class: "ab-link" })));
      if (entry) place.append(chatEntry(entry, new Map(), null));
    }, (error) => place.replaceChildren(el("span", { class: "ab-warn" }, `⚠ ${error.message}`)));
  }

  // ---- tabs ----

  parts() {
    const { told } = this, logs = told.logs.length;
    const tabs = [["chat", "Chat", () => this.chat()], ["tokens", "Tokens", () => this.tokens()]];
    if (told.rendered || told.render_error) tabs.push(["environment", "Environment", () => this.rendering()]);
    tabs.push(["scores", told.judge ? "Scores & judge" : "Scores", () => this.scores()], ["facts", "Facts", () => this.facts()]);
    if (logs) tabs.push(["logs", `Logs (${logs})`, () => el("div", { class: "ab-code" }, told.logs.join("\n"))]);
    return tabs;
  }

  chat() {
    const { told, page } = this, box = el("div", {});
    const act = { tokens: (turn) => this.showTokens(turn), curl: (turn) => this.copy("curl", { turn }), replay: page.facts.can_replay ? (turn, place) => this.replay(turn, place) : null };
    const links = [];
    if (told.parent) links.push(told.parent.known ? button(`↑ parent ${told.parent.id}`, () => page.open(told.parent.id)) : el("span", { class: "ab-quiet" }, `parent ${told.parent.id} is not in this view`));
    for (const child of told.children) links.push(button(`↓ sub-agent ${child.seat || child.scenario || child.id} (${numberText(child.reward)})`, () => page.open(child.id)));
    if (links.length) box.append(el("nav", { class: "ab-line", "aria-label": "Agents of this episode" }, ...links));
    if (told.tools.length) box.append(folded(`${countText(told.tools.length, "tool")} offered: ${told.tools.map((tool) => tool.name).join(", ")}`, ...told.tools.map((tool) => el("div", { class: "ab-tool" }, el("b", {}, tool.name), ` ${tool.description || ""}`, el("div", { class: "ab-code" }, tool.parameters || "")))));
    const histories = told.histories.map((history, i) => [String(i), history.title, () => chatView(history, act)]);
    box.append(histories.length > 1 ? new Tabs("Histories", histories).element : chatView(told.histories[0], act));
    return box;
  }

  tokens() {
    const titles = this.told.histories.map((history) => history.title);
    this.tokenView = new TokenView((history, start) => this.ask("tokens", { history, start }), titles, this.page.view);
    return this.tokenView.element;
  }

  async showTokens(turn) {
    this.tabs.show("tokens");
    for (let tries = 0; tries < 50 && !this.tokenView.told; tries += 1) await new Promise((done) => setTimeout(done, 100));
    this.tokenView.goTo(turn);
  }

  // Written by the environment, escaped by its contract, and shut in all the same: no scripts, no network.
  rendering() {
    if (!this.told.rendered) return el("div", { class: "ab-alert" }, `⚠ ${this.told.render_error}`);
    const style = getComputedStyle(this.page.root), policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
    const scheme = this.page.root.dataset.theme === "dark" ? "dark" : "light";
    const frame = el("iframe", { class: "ab-frame", sandbox: "", referrerpolicy: "no-referrer", title: "The environment's own view of this trajectory" });
    frame.srcdoc = `<!doctype html><meta http-equiv="Content-Security-Policy" content="${policy}"><style>:root{color-scheme:${scheme}}body{margin:8px;color:${style.color};background:${style.backgroundColor};font:13px/1.4 system-ui,sans-serif;overflow-wrap:anywhere}</style>${this.told.rendered}`;
    return frame;
  }

  scores() {
    const { told } = this, box = el("div", { class: "ab-cards" });
    const table = (title, values) => {
      const rows = Object.entries(values).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "ab-number" }, typeof value === "number" ? numberText(value) : String(value))));
      if (rows.length) box.append(el("section", { class: "ab-card" }, el("h5", {}, title), el("table", { class: "ab-plain" }, el("tbody", {}, ...rows))));
    };
    table("Parts of the reward", told.parts);
    table("Metrics", told.metrics);
    if (told.judge) {
      const { explanation, raw, score, ...more } = told.judge, card = el("section", { class: "ab-card ab-judge" }, el("h5", {}, `Judge${typeof score === "number" ? `: ${numberText(score)}` : ""}`));
      if (explanation) card.append(el("div", { class: "ab-said" }, explanation));
      if (Object.keys(more).length) card.append(el("div", { class: "ab-code" }, JSON.stringify(more, null, 2)));
      if (raw) card.append(folded("Its answer, as it came", el("div", { class: "ab-code" }, typeof raw === "string" ? raw : JSON.stringify(raw, null, 2))));
      box.append(card);
    }
    if (!box.children.length) box.append(el("p", { class: "ab-quiet" }, "No parts of the reward, no metrics and no judge."));
    return box;
  }

  facts() {
    const { told } = this, { timings } = told, box = el("div", { class: "ab-cards" });
    const card = (title, rows) => box.append(el("section", { class: "ab-card" }, el("h5", {}, title), el("table", { class: "ab-plain" }, el("tbody", {}, ...rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))))));
    const times = [["started", timings.started ? new Date(1000 * timings.started).toLocaleString() : null], ...["seconds", "queued", "sampling", "elsewhere"].map((name) => [name, timings[name] === null || timings[name] === undefined ? null : secondsText(timings[name])])];
    card("Time", times.filter(([, value]) => value !== null));
    const known = this.page.facts.columns.filter((column) => !/^(reward|metric)\//.test(column.key));
    card("Facts", known.map((column) => [column.title, told.facts[column.key]]).filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false).map(([name, value]) => [name, value === true ? "yes" : typeof value === "number" ? numberText(value) : String(value)]));
    if (told.metadata && told.metadata !== "{}") box.append(el("section", { class: "ab-card ab-judge" }, el("h5", {}, "Metadata"), longText(told.metadata, 6000, "ab-code")));
    return box;
  }
}
