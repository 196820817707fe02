// What was said in a trajectory? Messages with reasoning folded, and each tool call with its result.

const MOST_TEXT = 4000, MOST_SYSTEM = 500, MOST_OPEN = 60;
const ROLE_SIGNS = { system: "⚙", developer: "⚙", user: "◆", assistant: "●", tool: "▣" };
const PICTURE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+$/;
const SOUND = /^data:audio\/[a-z0-9.+-]+;base64,[A-Za-z0-9+/=\s]+$/;

// history: as the kernel tells it; act: {replay(turn), curl(turn), tokens(turn)}, each optional.
function chatView(history, act) {
  const box = el("div", { class: "ab-chat" });
  const answers = new Set(history.entries.flatMap((entry) => entry.calls.map((call) => call.result)).filter((index) => index !== null));
  const byIndex = new Map(history.entries.map((entry) => [entry.index, entry]));
  const entries = history.entries.filter((entry) => !answers.has(entry.index));
  const draw = (some) => some.forEach((entry) => box.append(chatEntry(entry, byIndex, act)));
  draw(entries.slice(0, MOST_OPEN));
  if (entries.length > MOST_OPEN) {
    const more = button(`Show the other ${countText(entries.length - MOST_OPEN, "message")}`, () => { more.remove(); draw(entries.slice(MOST_OPEN)); });
    box.append(more);
  }
  if (history.hidden) box.append(el("p", { class: "ab-quiet" }, `${countText(history.hidden, "message")} more in the stored trajectory, not shown here.`));
  if (!history.entries.length) box.append(el("p", { class: "ab-quiet" }, "No message."));
  return box;
}

function chatEntry(entry, byIndex, act, mark) {
  const box = el("article", { class: `ab-entry ab-role-${ROLE_SIGNS[entry.role] ? entry.role : "other"}` });
  const head = el("header", { class: "ab-entryhead" }, el("b", {}, `${ROLE_SIGNS[entry.role] || "·"} ${entry.role}${entry.name ? ` ${entry.name}` : ""}`));
  const facts = entryFacts(entry);
  if (facts.length) head.append(el("span", { class: "ab-quiet" }, facts.join(" · ")));
  if (entry.finish_reason === "length") head.append(el("span", { class: "ab-warn" }, "✂ cut off by max_tokens"));
  if (act && entry.sampled) head.append(turnButtons(entry, act));
  box.append(head);
  if (entry.reasoning) box.append(folded(`Reasoning, ${entry.reasoning.length.toLocaleString("en")} characters`, el("div", { class: "ab-said ab-reasoning" }, entry.reasoning)));
  if (mark !== undefined && mark !== null) box.append(markedText(entry.text, mark));
  else if (entry.text) box.append(longText(entry.text, entry.role === "system" ? MOST_SYSTEM : MOST_TEXT, "ab-said"));
  else if (!entry.calls.length && !entry.images.length) box.append(el("div", { class: "ab-said ab-quiet" }, "(empty)"));
  if (entry.cut) box.append(el("div", { class: "ab-quiet" }, `${entry.cut.toLocaleString("en")} more characters in the stored trajectory`));
  if (entry.unparsed) box.append(el("div", { class: "ab-unparsed" }, el("b", {}, "⚠ tool call not read: "), entry.unparsed));
  box.append(...entry.images.map(attachment), ...entry.calls.map((call) => callView(call, byIndex)));
  return box;
}

function entryFacts(entry) {
  const facts = [];
  if (entry.sampled) {
    facts.push(`turn ${entry.turn + 1}`, countText(entry.tokens, "token"));
    if (entry.mean_logprob !== null) facts.push(`mean logprob ${numberText(entry.mean_logprob)}`);
    facts.push(entry.version < 0 ? "base model" : `policy ${entry.version}`);
    if (entry.seconds !== null && entry.seconds !== undefined) facts.push(secondsText(entry.seconds));
    if (entry.credit !== null && entry.credit !== undefined) facts.push(`credit ${signed(entry.credit)}`);
  } else if (entry.role === "assistant") facts.push("given, not sampled: no loss");
  return facts;
}

function turnButtons(entry, act) {
  const bar = el("span", { class: "ab-turnbar" });
  if (act.tokens) bar.append(button("tokens", () => act.tokens(entry.turn), { class: "ab-link", title: "See this turn's tokens" }));
  if (act.curl) bar.append(button("curl", () => act.curl(entry.turn), { class: "ab-link", title: "Copy a command that asks a server the same" }));
  if (act.replay) bar.append(button("replay", (event) => act.replay(entry.turn, event.target.closest(".ab-entry")), { class: "ab-link", title: "Sample this turn anew with the current policy" }));
  return bar;
}

function callView(call, byIndex) {
  const box = el("div", { class: call.parsed ? "ab-call" : "ab-call ab-broken" });
  box.append(el("div", { class: "ab-callhead" }, el("b", {}, `→ ${call.name || "a tool"}`), call.parsed ? null : el("span", { class: "ab-warn" }, `⚠ arguments are not JSON${call.error ? `: ${call.error}` : ""}`)));
  box.append(longText(call.parsed ? call.arguments : call.raw, 1500, "ab-code"));
  const result = call.result === null || call.result === undefined ? null : byIndex.get(call.result);
  if (result) {
    box.append(el("div", { class: "ab-callhead ab-quiet" }, `← result${result.name ? ` of ${result.name}` : ""}`), longText(prettyText(result.text) || "(empty)", 2500, "ab-code ab-result"));
    box.append(...result.images.map(attachment));
  } else box.append(el("div", { class: "ab-quiet" }, "← no result"));
  return box;
}

function prettyText(text) {
  if (!/^\s*[{[]/.test(text) || text.length > 100000) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch (notJson) {
    return text;
  }
}

// Pictures and sounds only from what is stored with the trajectory; an address is shown, never loaded.
function attachment(image) {
  const about = [image.mime, image.bytes ? `${Math.ceil(image.bytes / 1024)} kB` : ""].filter(Boolean).join(", ");
  if (image.kind === "data" && PICTURE.test(image.source)) return el("figure", { class: "ab-picture" }, el("img", { src: image.source, alt: `Image of the conversation, ${about}` }), el("figcaption", { class: "ab-quiet" }, about));
  if (image.kind === "audio" && SOUND.test(image.source)) return el("figure", { class: "ab-picture" }, el("audio", { src: image.source, controls: true }), el("figcaption", { class: "ab-quiet" }, about));
  return el("div", { class: "ab-attachment" }, `${image.kind === "url" ? "address" : "attachment"}, ${image.kind === "url" ? "not loaded: " : ""}${image.kind === "data" || image.kind === "audio" ? about : image.source}`);
}

// The text with what follows the first difference standing out.
function markedText(text, at) {
  const from = Math.max(0, Math.min(at, text.length)), box = el("div", { class: "ab-said" }, text.slice(0, from));
  box.append(el("mark", { class: "ab-differs", title: "Different from here on" }, text.slice(from) || "∎"));
  return box;
}
