// Names come from a model: they become text nodes and attributes, never markup.
const SVG = "http://www.w3.org/2000/svg";
const { picture, kinds: KINDS } = JSON.parse(document.getElementById("data").textContent);
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

// As the verdicts have it, so that the numbers of a row can be compared: milliseconds, to the microsecond.
function time(seconds) {
  const size = Math.abs(seconds);
  if (size >= 1) return `${seconds.toFixed(2)} s`;
  return size === 0 ? "0" : `${size < 1e-6 ? +(seconds * 1e3).toPrecision(2) : (seconds * 1e3).toFixed(3)} ms`;
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
// Lines may end behind dots rather than anywhere.
const broken = (name) => name.split(".").flatMap((step, place) => (place ? [".", el("wbr"), step] : [step]));
const isGather = (one) => one.kind === "all_gather";
const hiddenShare = (one) => (one.seconds ? 1 - Math.min(one.exposed_s / one.seconds, 1) : 1);
const swatch = (name, words) => el("span", {}, el("i", { class: `swatch ${name}` }), words);

// What is shown: a step, its collectives, the seconds in view; the collective that was clicked; how the table is sorted.
let step, sent, view, picked, sorting;

// A box that scrolls ends where a row does, dashed where more rows are below.
function fit(name) {
  const table = find(name), box = table.parentElement, limit = 640;
  box.style.maxHeight = "none";
  const top = table.getBoundingClientRect().top, rows = [...table.tBodies[0].rows];
  const ends = rows.map((row) => row.getBoundingClientRect().bottom - top);
  const more = ends.length > 0 && ends[ends.length - 1] > limit;
  box.classList.toggle("more", more);
  if (more) box.style.maxHeight = `${(ends.filter((end) => end <= limit).pop() || ends[0]) + 2}px`;
}
