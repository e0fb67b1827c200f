"use strict";
// Names come from a model: they become text nodes and attributes, never markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const KINDS = ["parameter shard", "batch and buffers", "returned by forward", "gathered", "communication buffer", "activation", "gradient", "other"];
  const picture = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);

  function make(space, tag, attributes, children) {
    const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((one) => one !== null && one !== undefined));
    return node;
  }
  const el = (tag, attributes, ...children) => make("", tag, attributes, children);
  const svg = (tag, attributes, ...children) => make(SVG, tag, attributes, children);

  function time(seconds) {
    const size = Math.abs(seconds);
    if (size >= 1) return `${seconds.toFixed(2)} s`;
    if (size >= 1e-3) return `${(seconds * 1e3).toFixed(size >= 0.1 ? 0 : 2)} ms`;
    return size === 0 ? "0" : `${(seconds * 1e6).toFixed(size >= 1e-4 ? 0 : 1)} µs`;
  }
  function bytes(count) {
    let size = count;
    for (const unit of ["B", "KiB", "MiB"]) {
      if (size < 1024) return unit === "B" ? `${count} B` : `${size.toFixed(1)} ${unit}`;
      size /= 1024;
    }
    return `${size.toFixed(2)} GiB`;
  }
  const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
  const named = (fqns) => fqns[0] + (fqns.length > 1 ? ` +${fqns.length - 1}` : "");
  const isGather = (one) => one.kind === "all_gather";
  const hiddenShare = (one) => (one.seconds ? 1 - Math.min(one.exposed_s / one.seconds, 1) : 1);
  const swatch = (name, words) => el("span", {}, el("i", { class: `swatch ${name}` }), words);

  let step, sent, view, picked, sorting;

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
      root.append(svg("text", { x: place, y: height - 5, "text-anchor": anchor }, time(Math.abs(at) < every / 2 ? 0 : +at.toPrecision(6))));
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
      root.append(svg("text", { class: "in", x: Math.max(left, 0) + 5, y: y + LANE / 2 + 4 }, text));
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
    ["parameters", (one) => one.fqns[0], "name", (one) => el("span", { title: one.fqns.join("\n") }, named(one.fqns))],
    ["dtype", (one) => one.dtype, "", (one) => one.dtype],
    ["bytes a rank", (one) => one.num_bytes, "right", (one) => bytes(one.num_bytes)],
    ["takes", (one) => one.seconds, "right", (one) => time(one.seconds)],
    ["hidden", hiddenShare, "", (one) => {
      const filled = el("i", {});
      filled.style.width = percent(hiddenShare(one)).replace(" ", "");
      return el("span", {}, el("span", { class: "share" }, filled), percent(hiddenShare(one)));
    }],
    ["exposed", (one) => one.exposed_s, "right", (one) => (one.exposed_s ? time(one.exposed_s) : "–")],
    ["verdict", (one) => one.cause, "words", (one) => el("span", {}, el("span", { class: one.exposed_s ? "chip" : "chip hidden" }, one.cause), one.exposed_s ? ` ${one.verdict}` : "")],
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
      const cells = COLUMNS.map(([, , side, show]) => el("td", { class: side || false }, show(one)));
      return el("tr", { class: picked === one ? "row chosen" : "row", "data-number": one.number, onclick: () => choose(one, true) }, ...cells);
    }));
  }
  function owners() {
    const peak = highest();
    find("held").hidden = !peak;
    if (!peak) return;
    const list = peak.memory.owners, total = peak.memory.peak_bytes || 1;
    const named = list.slice(0, 200), rest = list.slice(200).reduce((sum, one) => sum + one.num_bytes, 0);
    find("peak-at").textContent = `${bytes(peak.memory.peak_bytes)} in ${peak.stage}, at ${peak.memory.peak_at} (${time(peak.memory.peak_s)}); ${list.length} owners, largest first`;
    head("owners", [["owner"], ["kind"], ["bytes", null, "right"], ["share", null, "right"]]);
    const row = (name, kind, count) => el("tr", {}, el("td", { class: "what" }, name), el("td", {}, kind >= 0 ? swatch(`m${kind}`, KINDS[kind]) : ""), el("td", { class: "right" }, bytes(count)), el("td", { class: "right" }, percent(count / total)));
    const rows = named.map((one) => row(one.of ? `${one.of}  (${one.name})` : one.name, KINDS.indexOf(one.kind), one.num_bytes));
    if (rest) rows.push(row(`${list.length - 200} more`, -1, rest));
    find("owners").tBodies[0].replaceChildren(...rows);
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
      el("p", { class: "hint" }, `${step.plan_id}: ${whole.again.length} gathered again in backward, ${whole.keep.length} kept${(whole.recompute || []).length ? `, activations of ${whole.recompute.length} computed again` : ""}.`),
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
  new ResizeObserver(() => { cancelAnimationFrame(due); due = requestAnimationFrame(() => step && draw()); }).observe(chart);
  if (picture.steps.length) show(0);
  else for (const id of ["figures", "when", "sent", "held", "stay", "passes", "planned"]) find(id).hidden = true;
})();
