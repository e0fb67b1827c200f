// The step's figures, above everything.
function figures() {
  const waits = sent.filter((one) => one.exposed_s > 0);
  const causes = {};
  for (const one of waits) causes[one.cause] = (causes[one.cause] || 0) + 1;
  const said = Object.entries(causes).sort((a, b) => b[1] - a[1]).map(([cause, count]) => `${cause} (${count})`);
  const share = step.seconds ? step.exposed_s / step.seconds : 0;
  const rows = [
    [time(step.seconds), step.graphs.map((one) => `${one.stage} ${time(one.seconds)}`).join(", ")],
    [time(step.exposed_s), `exposed: waiting, ${percent(share)} of the step`, share > 0.1],
    [bytes(step.peak_bytes), `peak of a rank, ${bytes(step.held_bytes)} of it held before`],
    [`${sent.length}`, `collectives, ${sent.length - waits.length} of them hidden`],
    [`${waits.length}`, waits.length ? `exposed, because of ${said.join(", ")}` : "exposed"],
  ];
  const together = (words) => words.replace(/(\d) (ms|s|µs|B|KiB|MiB|GiB|%)/g, "$1\u00a0$2");  // no line ends between
  find("figures").replaceChildren(...rows.map(([number, words, bad]) =>
    el("div", { class: bad ? "figure bad" : "figure" }, el("b", {}, number), el("span", {}, together(words)))));
}

// What the passes did.
function passes() {
  const list = step.differences, groups = new Map();
  list.forEach((one, place) => groups.set(one.stage, [...(groups.get(one.stage) || []), place]));
  find("passes").hidden = !list.length;
  find("pass-tabs").replaceChildren(...[...groups].map(([stage, places]) => el("div", { class: "group" }, el("em", {}, stage), ...places.map((place) =>
    el("button", { type: "button", "data-pass": `${stage} ${list[place].name}`, class: list[place].lines.length ? false : "same", onclick: () => difference(place) }, list[place].name)))));
  const first = list.findIndex((one) => one.name === "insert" && one.lines.length);
  if (list.length) difference(Math.max(first, 0));
}
function difference(place) {
  const one = step.differences[place], names = { "+": "add", "-": "del", "@": "cut" };
  for (const button of find("pass-tabs").querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.pass === `${one.stage} ${one.name}`);
  const lines = one.lines.map((line) => {
    if (line[0] === "@") return el("span", { class: "cut" }, line.replace(/@@ -(\d+).*/, "line $1"));
    const cut = line.indexOf("  # ");
    return el("span", { class: names[line[0]] || false }, cut < 0 ? line : line.slice(0, cut), cut < 0 ? null : el("i", {}, line.slice(cut)));
  });
  if (!lines.length) lines.push(el("span", {}, "The graph stayed as it was."));
  if (one.num_left_out) lines.push(el("span", { class: "cut" }, `${one.num_left_out} more lines are not on this page: report.save(folder) writes them all.`));
  find("difference").replaceChildren(el("span", { class: "cut" }, `${one.stage}, ${one.name}: ${one.count} done in ${time(one.seconds)}`), ...lines);
  find("difference").scrollTop = 0;
}

function plan() {
  const whole = step.plan;
  find("planned").hidden = !whole.stage;
  if (!whole.stage) return;
  const halves = [whole.forward, whole.backward].filter(Boolean);
  const launches = (half) => el("ol", { start: 0 }, ...half.order.map(([kind, place]) => {
    const bucket = (kind === "gather" ? half.gathers : half.reduces)[place];
    return el("li", {}, el("i", { class: `dot f-${kind}` }), `${kind} ${bucket.fqns.join(", ")} `, el("code", {}, `${bucket.dtype}, ${bytes(bucket.num_bytes)}`));
  }));
  find("plan").replaceChildren(
    el("p", { class: "hint" }, `${step.plan_id}: ${whole.again.length} gathered again in backward, ${whole.keep.length} kept${(whole.slices || []).length ? `, slices of ${whole.slices.length}` : ""}${(whole.recompute || []).length ? `, activations of ${whole.recompute.length} computed again` : ""}.`),
    ...(step.choice ? [el("pre", {}, el("span", {}, step.choice))] : []),
    el("div", { class: "halves" }, ...(halves.length ? halves : [whole]).map((half) => el("div", {}, el("h3", {}, `${half.stage}, in the order of launch`), launches(half)))),
    el("details", {}, el("summary", {}, "As JSON, for configure(model, plan=...)"), el("pre", {}, el("span", {}, JSON.stringify(whole, null, 1)))),
  );
}

function show(number) {
  step = picture.steps[number];
  sent = step.graphs.flatMap((graph) => graph.collectives.map((one) => ({ ...one, stage: graph.stage })));
  sent.forEach((one, place) => { one.number = place; });
  picked = null;
  sorting = { place: 0, down: false };
  view = { from: 0, to: step.seconds || 1 };
  find("picked").replaceChildren();
  find("about").textContent = [step.profile && `planned on the hardware profile “${step.profile}”`, `torch ${picture.torch}`, "fsdp_compile"].filter(Boolean).join(" · ");
  find("figures").hidden = find("when").hidden = find("sent").hidden = !step.graphs.length;
  const held = new Set(step.graphs.flatMap((one) => Object.keys(one.memory.of_kind)));
  find("memory-legend").replaceChildren(...KINDS.filter((kind) => held.has(kind)).map((kind) => swatch(`m${KINDS.indexOf(kind)}`, kind)));
  figures(); draw(); table(); owners(); params(); passes(); plan();
}

find("model").textContent = picture.model;
find("lanes-legend").replaceChildren(swatch("f-compute", "compute"), swatch("f-copy", "packing"), swatch("f-wait", "waiting, exposed"), swatch("f-gather", "gather"), swatch("f-reduce", "reduction"));
find("notes").replaceChildren(...picture.notes.map((note) => el("li", {}, note)));
find("said").hidden = !picture.notes.length;
find("filter").addEventListener("input", table);
find("step").replaceChildren(...picture.steps.map((one, place) => el("option", { value: place }, one.name)));
find("step").hidden = picture.steps.length < 2;
find("step").onchange = (event) => show(+event.target.value);
find("theme").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (getComputedStyle(document.documentElement).colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.style.colorScheme = dark ? "light" : "dark";
};
let due = 0;
new ResizeObserver(() => { cancelAnimationFrame(due); due = requestAnimationFrame(() => { if (step) { draw(); fit("collectives"); fit("owners"); } }); }).observe(chart);
if (picture.steps.length) show(0);
else for (const id of ["figures", "when", "sent", "held", "stay", "passes", "planned"]) find(id).hidden = true;
