// What was clicked.
function card(title, rows, names) {
  const list = el("dl", {}, ...rows.flatMap(([term, words]) => [el("dt", {}, term), el("dd", {}, words)]));
  if (names) list.append(el("dt", {}, names.length > 1 ? `${names.length} parameters` : "parameter"), el("dd", {}, el("div", { class: "names" }, ...names.map((name) => el("span", {}, name)))));
  find("picked").replaceChildren(el("h3", {}, title), list);
}
function choose(one, reveal) {
  picked = one;
  const [launchedBehind, launchedBefore, waitedBehind, waitedBefore] = one.places;
  card(`${one.kind} of ${named(one.fqns)}`, [
    ["verdict", el("span", {}, el("span", { class: one.exposed_s ? "chip" : "chip hidden" }, one.cause), ` ${one.verdict}`)],
    ["takes", `${time(one.seconds)}, ${time(one.exposed_s)} of it exposed; ${percent(hiddenShare(one))} hidden`],
    ["launched", `at ${time(one.launched_s)} in ${one.stage}, between ${launchedBehind} and ${launchedBefore}`],
    ["on the links", `${time(one.start_s)} to ${time(one.end_s)}${one.start_s > one.launched_s ? `, after ${time(one.start_s - one.launched_s)} in the queue` : ""}`],
    ["waited for", `at ${time(one.waited_s)}, between ${waitedBehind} and ${waitedBefore}`],
    ["bytes", `${bytes(one.num_bytes)} a rank, ${bytes(one.bucket_bytes)} in all, ${one.dtype} on the wire`],
    ["unit", one.unit],
    ["group", one.group],
  ], one.fqns);
  if (reveal) {
    const length = view.to - view.from, middle = (one.start_s + one.end_s) / 2;
    if (one.start_s < view.from || one.end_s > view.to) view = { from: Math.max(middle - length / 2, 0), to: Math.max(middle - length / 2, 0) + length };
    find("when").scrollIntoView({ block: "start" });
  }
  draw();
  table();
}
function work(one, graph) {
  const beside = sent.filter((other) => other.start_s < one.end_s && other.end_s > one.start_s);
  card(one.operator, [
    ["node", one.name],
    ["module", one.module || "none is known"],
    ["takes", `${time(one.end_s - one.start_s)}, from ${time(one.start_s)} in ${graph.stage}`],
    ["beside it", beside.length ? beside.slice(0, 6).map((other) => `${other.kind} of ${named(other.fqns)}`).join(", ") : "no collective"],
  ]);
}
function several(works) {
  const total = works.reduce((sum, one) => sum + one.end_s - one.start_s, 0);
  card(`${works.length} operators`, [["take", time(total)], ["modules", [...new Set(works.map((one) => one.module).filter(Boolean))].slice(0, 8).join(", ") || "none is known"]], works.slice(0, 60).map((one) => one.operator));
}

// Tables.
const COLUMNS = [
  ["#", (one) => one.number, "right", (one) => `${one.number}`],
  ["graph", (one) => one.stage, "", (one) => one.stage],
  ["kind", (one) => one.kind, "", (one) => el("span", {}, el("i", { class: `dot ${isGather(one) ? "f-gather" : "f-reduce"}` }), one.kind)],
  ["parameters", (one) => one.fqns[0], "name", (one) => el("span", { title: one.fqns.join("\n") }, ...broken(named(one.fqns)))],
  ["dtype", (one) => one.dtype, "", (one) => one.dtype],
  ["bytes a rank", (one) => one.num_bytes, "right", (one) => bytes(one.num_bytes)],
  ["takes", (one) => one.seconds, "right", (one) => time(one.seconds)],
  ["hidden", hiddenShare, "", (one) => {
    const filled = el("i", {});
    filled.style.width = percent(hiddenShare(one)).replace(" ", "");
    return el("span", {}, el("span", { class: "share" }, filled), percent(hiddenShare(one)));
  }],
  ["exposed", (one) => one.exposed_s, "right", (one) => (one.exposed_s ? time(one.exposed_s) : "–")],
  ["verdict", (one) => one.cause, "words", (one) => el("span", {}, el("span", { class: one.exposed_s ? "chip" : "chip hidden" }, one.cause), one.exposed_s ? " " : "", ...(one.exposed_s ? broken(one.verdict) : []))],
];
function head(name, columns, pick) {
  const cells = columns.map(([title, , side], place) => {
    const sort = sorting && pick && sorting.place === place ? (sorting.down ? "descending" : "ascending") : pick ? "none" : false;
    return el("th", { class: side === "right" ? "right" : false, "aria-sort": sort }, pick ? el("button", { type: "button", onclick: () => pick(place) }, title) : title);
  });
  find(name).tHead.replaceChildren(el("tr", {}, ...cells));
}
function table() {
  head("collectives", COLUMNS, (place) => {
    sorting = { place, down: sorting.place === place ? !sorting.down : [5, 6, 8].includes(place) };
    table();
  });
  const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = sent.filter((one) => {
    const text = [one.stage, one.kind, one.unit, one.dtype, one.cause, one.group, ...one.fqns].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const key = COLUMNS[sorting.place][1], sign = sorting.down ? -1 : 1;
  rows.sort((a, b) => { const [p, q] = [key(a), key(b)]; return sign * (p < q ? -1 : p > q ? 1 : 0) || a.number - b.number; });
  const exposed = rows.reduce((sum, one) => sum + one.exposed_s, 0);
  find("shown").textContent = `${rows.length} of ${sent.length}, ${time(exposed)} exposed`;
  find("collectives").tBodies[0].replaceChildren(...rows.map((one) => {
    const cells = COLUMNS.map(([title, , side, show]) => el("td", { class: side || false, "data-title": title }, show(one)));
    return el("tr", { class: picked === one ? "row chosen" : "row", "data-number": one.number, onclick: () => choose(one, true) }, ...cells);
  }));
  fit("collectives");
}
function owners() {
  const peak = highest();
  find("held").hidden = !peak;
  if (!peak) return;
  const list = peak.memory.owners, total = peak.memory.peak_bytes || 1;
  const named = list.slice(0, 200), rest = list.slice(200).reduce((sum, one) => sum + one.num_bytes, 0);
  find("peak-at").textContent = `${bytes(peak.memory.peak_bytes)} in ${peak.stage}, at ${peak.memory.peak_at} (${time(peak.memory.peak_s)}); ${list.length} owners, largest first`;
  head("owners", [["owner"], ["kind"], ["bytes", null, "right"], ["share", null, "right"]]);
  const row = (name, kind, count) => el("tr", {}, el("td", { class: "what" }, ...broken(name)), el("td", {}, kind >= 0 ? swatch(`m${kind}`, KINDS[kind]) : ""), el("td", { class: "right" }, bytes(count)), el("td", { class: "right" }, percent(count / total)));
  const rows = named.map((one) => row(one.of ? `${one.of}  (${one.name})` : one.name, KINDS.indexOf(one.kind), one.num_bytes));
  if (rest) rows.push(row(`${list.length - 200} more`, -1, rest));
  find("owners").tBodies[0].replaceChildren(...rows);
  fit("owners");
}
function params() {
  const groups = new Map();
  for (const [name, becomes, why] of step.params) {
    const key = `${becomes}: ${why}`;
    groups.set(key, [...(groups.get(key) || []), name]);
  }
  find("stay").hidden = !groups.size;
  find("params").replaceChildren(...[...groups].map(([key, names]) =>
    el("details", {}, el("summary", {}, `${names.length} ${key}`), el("div", { class: "names" }, ...names.map((name) => el("span", {}, name))))));
}
