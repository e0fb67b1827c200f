// Time line. Bars narrower than a pixel are drawn as one.
const chart = find("chart"), tip = el("div", { id: "tip" });
document.body.append(tip);
const LANE = 26, GAP = 20, TOP = 20, MEMORY = 150;

function lanes() {
  const found = ["compute"];
  for (const graph of step.graphs)
    for (const one of [...graph.collectives.map((one) => one.group), ...graph.others.map((one) => one.lane)])
      if (!found.includes(one)) found.push(one);
  return found;
}
function draw() {
  if (!step.graphs.length) return chart.replaceChildren(el("p", { class: "hint" }, "This step was not lowered: nothing is predicted of it."));
  const width = Math.max(chart.clientWidth, 260), rows = lanes();
  const x = (seconds) => ((seconds - view.from) / (view.to - view.from)) * width;
  const under = TOP + rows.length * (LANE + GAP), height = under + 16 + MEMORY + 22;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
  for (const graph of step.graphs) {
    const left = Math.max(x(graph.start_s), 0), right = Math.min(x(graph.start_s + graph.seconds), width);
    if (right <= left) continue;
    root.append(svg("rect", { class: `band ${graph.stage}`, x: left, y: 0, width: right - left, height: height - 20 }));
    if (right - left > 60) root.append(svg("text", { x: left + 6, y: 13 }, graph.stage));
  }
  ticks(root, x, width, height);
  rows.forEach((name, place) => {
    const y = TOP + place * (LANE + GAP) + GAP - 4;
    root.append(svg("rect", { class: "lane", x: 0, y, width, height: LANE }));
    root.append(svg("text", { x: 4, y: y - 4 }, place ? `communication, group ${name}` : "compute"));
    if (place) communication(root, name, x, y, width); else computation(root, x, y, width);
  });
  memory(root, x, under + 16, width);
  chart.replaceChildren(root);
}
function ticks(root, x, width, height) {
  const span = view.to - view.from, raw = span / Math.max(width / 110, 2), power = 10 ** Math.floor(Math.log10(raw));
  const every = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  for (let at = Math.ceil(view.from / every) * every; at <= view.to; at += every) {
    const place = x(at);
    root.append(svg("line", { class: "tick", x1: place, x2: place, y1: 0, y2: height - 18 }));
    const anchor = place < 20 ? "start" : place > width - 30 ? "end" : "middle";
    root.append(svg("text", { x: place, y: height - 5, "text-anchor": anchor }, Math.abs(at) < every / 2 ? "0" : every >= 0.1 ? `${+at.toPrecision(6)} s` : `${+(at * 1e3).toPrecision(6)} ms`));
  }
}
function bar(root, left, right, y, name, words, label, pick, chosen) {
  const width = Math.max(right - left, 1.2);
  const rect = svg("rect", {
    class: `bar ${name}${chosen ? " chosen" : ""}`, x: left, y: y + 2, width, height: LANE - 4, rx: Math.min(3, width / 3),
    onmousemove: (event) => hover(event, words), onmouseleave: () => tip.replaceChildren(),
  });
  rect.pick = pick;
  root.append(rect);
  const room = Math.floor((Math.min(right, chart.clientWidth) - Math.max(left, 0) - 10) / 6.4);
  if (room >= 4 && label) {
    const text = label.length > room ? `${label.slice(0, room - 1)}…` : label;
    root.append(svg("text", { class: `in on-${name}`, x: Math.max(left, 0) + 5, y: y + LANE / 2 + 4 }, text));
  }
  return rect;
}
function computation(root, x, y, width) {
  for (const graph of step.graphs) {
    let merged = null;
    const flush = () => {
      if (merged) bar(root, merged.left, merged.right, y, "f-compute", `${merged.works.length} operators: zoom in`, "", () => several(merged.works));
      merged = null;
    };
    for (const one of graph.compute) {
      const left = x(one.start_s), right = x(one.end_s);
      if (right < 0 || left > width) continue;
      if (right - left < 1.5) {
        if (merged && left - merged.left > 6) flush();
        merged = merged || { left, right, works: [] };
        merged.right = right; merged.works.push(one);
        continue;
      }
      flush();
      const words = `${one.operator}${one.module ? `\n${one.module}` : ""}\n${time(one.end_s - one.start_s)}`;
      bar(root, left, right, y, one.lane === "copy" ? "f-copy" : "f-compute", words, one.operator, () => work(one, graph));
    }
    flush();
  }
  for (const one of sent) {
    const right = x(one.end_s), left = x(one.end_s - one.exposed_s);
    if (!one.exposed_s || right < 0 || left > width) continue;
    const words = `waiting for ${one.kind} of ${named(one.fqns)}\n${time(one.exposed_s)}: ${one.cause}`;
    bar(root, left, right, y, "f-wait", words, "waiting", () => choose(one, false));
  }
}
function communication(root, group, x, y, width) {
  for (const one of sent) {
    if (one.group !== group) continue;
    const left = x(one.start_s), right = x(one.end_s), from = x(one.launched_s);
    if (right < 0 || from > width) continue;
    if (left - from > 3) root.append(svg("line", { class: "queued", x1: Math.max(from, 0), x2: left, y1: y + 1, y2: y + 1 }));
    const words = `${one.kind} of ${named(one.fqns)}\n${bytes(one.bucket_bytes)}, ${time(one.seconds)}, ${one.exposed_s ? `${time(one.exposed_s)} exposed: ${one.cause}` : "hidden"}`;
    const rect = bar(root, left, right, y, isGather(one) ? "f-gather" : "f-reduce", words, named(one.fqns), () => choose(one, false), picked === one);
    rect.setAttribute("data-collective", one.number);
  }
  for (const graph of step.graphs)
    for (const one of graph.others)
      if (one.lane === group) bar(root, x(one.start_s), x(one.end_s), y, "f-other", `${one.operator}\n${time(one.end_s - one.start_s)}`, one.operator, () => work(one, graph));
}
function memory(root, x, y, width) {
  const top = Math.max(...step.graphs.map((one) => one.memory.peak_bytes), 1);
  const place = (count) => y + MEMORY - (count / top) * (MEMORY - 14);
  root.append(svg("text", { x: 4, y: y - 4 }, `memory, up to ${bytes(top)}`));
  for (const graph of step.graphs) {
    const { at, of_kind: kinds } = graph.memory, end = graph.start_s + graph.seconds;
    const kept = at.map((_, index) => index).filter((index) => (at[index + 1] ?? end) >= view.from && at[index] <= view.to);
    if (!kept.length) continue;
    const base = at.map(() => 0);
    for (const kind of KINDS) {
      if (!kinds[kind]) continue;
      const upper = [], lower = [];
      let last = -9, high = 0, low = Infinity;
      for (const index of kept) {  // of what falls on one pixel, the highest
        const left = x(Math.max(at[index], view.from)), right = x(Math.min(at[index + 1] ?? end, view.to));
        const total = base[index] + kinds[kind][index];
        if (left - last < 0.4 && upper.length) {
          if (total > high) { high = total; low = base[index]; }
          upper[upper.length - 1] = [last, right, high]; lower[lower.length - 1] = [last, right, low];
        } else { last = left; high = total; low = base[index]; upper.push([left, right, total]); lower.push([left, right, base[index]]); }
      }
      const there = upper.map(([left, right, count]) => `${left.toFixed(1)} ${place(count).toFixed(1)} L ${right.toFixed(1)} ${place(count).toFixed(1)}`).join(" L ");
      const back = lower.reverse().map(([left, right, count]) => `${right.toFixed(1)} ${place(count).toFixed(1)} L ${left.toFixed(1)} ${place(count).toFixed(1)}`).join(" L ");
      root.append(svg("path", { class: `m${KINDS.indexOf(kind)}`, d: `M ${there} L ${back} Z` }));
      kinds[kind].forEach((count, index) => { base[index] += count; });
    }
  }
  const peak = highest();
  if (peak) {
    const at = x(peak.memory.peak_s);
    root.append(svg("line", { class: "peak", x1: 0, x2: width, y1: place(top), y2: place(top) }));
    if (at >= 0 && at <= width) root.append(svg("circle", { class: "f-wait", cx: Math.min(Math.max(at, 4), width - 4), cy: place(top), r: 4 }));
  }
  const over = svg("rect", { x: 0, y, width, height: MEMORY, fill: "transparent", "data-memory": "1", onmousemove: (event) => hover(event, momentWords(timeAt(event))), onmouseleave: () => tip.replaceChildren() });
  over.pick = (event) => moment(timeAt(event));
  root.append(over);
}
function hover(event, words) {
  tip.textContent = words;
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8)}px`;
}
function timeAt(event) {
  const box = chart.getBoundingClientRect();
  return view.from + ((event.clientX - box.left) / box.width) * (view.to - view.from);
}
const highest = () => step.graphs.reduce((best, one) => (!best || one.memory.peak_bytes > best.memory.peak_bytes ? one : best), null);

function levelsAt(at) {
  const graph = step.graphs.find((one) => at >= one.start_s && at <= one.start_s + one.seconds);
  if (!graph || !graph.memory.at.length) return null;
  let index = 0;
  graph.memory.at.forEach((begin, place) => { if (begin <= at) index = place; });
  return { graph, rows: KINDS.filter((kind) => graph.memory.of_kind[kind]).map((kind) => [kind, graph.memory.of_kind[kind][index]]) };
}
function momentWords(at) {
  const found = levelsAt(at);
  return found ? [time(at), ...found.rows.filter((row) => row[1]).map(([kind, count]) => `${kind}: ${bytes(count)}`)].join("\n") : "";
}
function moment(at) {
  const found = levelsAt(at);
  if (!found) return;
  const total = found.rows.reduce((sum, row) => sum + row[1], 0);
  card(`${bytes(total)} alive at ${time(at)}, in ${found.graph.stage}`, found.rows.filter((row) => row[1]).map(([kind, count]) => [kind, `${bytes(count)}, ${percent(count / total)}`]));
}

function zoom(factor, around) {
  const center = around ?? (view.from + view.to) / 2;
  const length = Math.min(Math.max((view.to - view.from) * factor, step.seconds / 20000), step.seconds);
  const share = (center - view.from) / (view.to - view.from);
  move(center - share * length, length);
}
function move(from, length) {
  const begin = Math.min(Math.max(from, 0), step.seconds - length);
  view = { from: begin, to: begin + length };
  draw();
}
const all = () => { view = { from: 0, to: step.seconds || 1 }; draw(); };

// Pointers: one moves, two zoom; one that did not move was a click.
const touching = new Map();
let began = null, apart = 0;
chart.addEventListener("pointerdown", (event) => {
  touching.set(event.pointerId, event);
  began = { x: event.clientX, from: view.from, moved: false, target: event.target };
  apart = 0;
});
window.addEventListener("pointermove", (event) => {
  if (!touching.has(event.pointerId) || !began) return;
  touching.set(event.pointerId, event);
  const length = view.to - view.from;
  if (touching.size > 1) {
    const [one, two] = [...touching.values()], now = Math.abs(one.clientX - two.clientX) || 1;
    if (apart) zoom(apart / now, (timeAt(one) + timeAt(two)) / 2);
    apart = now; began.moved = true;
  } else if (Math.abs(event.clientX - began.x) > 4 || began.moved) {
    began.moved = true;
    chart.classList.add("moving");
    move(began.from - ((event.clientX - began.x) / chart.clientWidth) * length, length);
  }
});
const release = (event) => {
  const was = began;
  if (!touching.delete(event.pointerId) || touching.size) return;
  began = null;
  chart.classList.remove("moving");
  if (event.type === "pointerup" && was && !was.moved && was.target.pick) was.target.pick(event);
};
window.addEventListener("pointerup", release);
window.addEventListener("pointercancel", release);
chart.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
}, { passive: false });
chart.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event)));
chart.addEventListener("keydown", (event) => {
  const length = view.to - view.from;
  const keys = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: all, ArrowLeft: () => move(view.from - length / 5, length), ArrowRight: () => move(view.from + length / 5, length) };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
find("zoom-in").onclick = () => zoom(0.5);
find("zoom-out").onclick = () => zoom(2);
find("zoom-all").onclick = all;
