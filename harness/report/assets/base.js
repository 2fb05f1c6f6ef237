// The packed rows, unpacked; elements, numbers and scales that every part of the page uses.
const D = JSON.parse(document.getElementById("data").textContent);
const AXES = Object.fromEntries(D.axes.map((name, i) => [name, i]));
const FIELDS = Object.fromEntries(D.fields.map((name, i) => [name, i]));
const STATES = D.states.map(([name, glyph, what]) => ({ name, glyph, what }));
const MISSING = STATES.findIndex((s) => s.name === "missing");

const ROWS = D.rows.map((r, i) => ({
  i, run: r[0], line: r[1], state: r[2], time: r[3] || null, repro: r[4], axes: r[5], fields: r[6],
}));
const MEASURED = ROWS.slice();
for (const axes of D.missing) {
  ROWS.push({ i: ROWS.length, run: -1, line: -1, state: MISSING, time: null, repro: "", axes, fields: null });
}
const axis = (row, name) => (name === "impl" && row.vendor ? row.time.impl : name in AXES ? D.pool[row.axes[AXES[name]]] : null);
const field = (row, name) => (row.vendor && name === "memory" ? row.time : row.fields ? D.pool[row.fields[FIELDS[name]]] : null);
const source = (row, path) => `${row.run}:${row.line}:${row.vendor ? path.replace(/^(time|memory)/, "decisions.today") : path}`;
// A bench row holds what a vendor took for the same call: the same cell, the vendor's time and memory.
const caseOf = (row) => (field(row, "decisions") || {}).case || (["ci", "full", null].includes(axis(row, "size")) ? "" : String(axis(row, "size")));
function titled(row) {
  const [path, named] = [String(axis(row, "path")), caseOf(row)];
  if (path.includes(named)) return path;
  return named.includes(path.split("_")[0]) ? named : `${path} ${named}`;
}
function today(row) {
  const t = (field(row, "decisions") || {}).today;
  return t ? { ...row, time: t, vendor: true } : null;
}

const $ = (id) => document.getElementById(id);
function el(tag, props, ...children) {
  const svg = ["svg", "line", "circle", "path", "rect", "text", "g", "polyline"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, f] of Object.entries(value)) node.addEventListener(event, f);
    else node.setAttribute(key === "cls" ? "class" : key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined));
  return node;
}
const num = (text, src) => el("span", { cls: "num", "data-src": src }, text);

function digits(value, significant = 3) {
  if (value === 0) return "0";
  const places = Math.max(0, significant - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(places, 12));
}
function duration(us) {
  if (us >= 1e6) return `${digits(us / 1e6)} s`;
  return us >= 1e3 ? `${digits(us / 1e3)} ms` : `${digits(us)} µs`;
}
function bytes(count) {
  for (const [unit, step] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= step) return `${digits(count / step)} ${unit}`;
  }
  return `${count} B`;
}
const numbered = (row, path, value, write) => (value === null || value === undefined ? null : num(write(value), source(row, path)));
const median = (row) => numbered(row, "time.median_us", row.time && row.time.median_us, duration);
const fraction = (row) => numbered(row, "time.copy_fraction", row.time && row.time.copy_fraction, (v) => digits(v, 2));
function memory(row) {
  const m = field(row, "memory");
  return m ? numbered(row, "memory.peak_extra_bytes", m.peak_extra_bytes, bytes) : null;
}
const absent = (row, what) => field(row, `${what}_absent`) || (row.fields ? "" : "NOT_REACHED");

const name = (row) => `${titled(row)} · ${axis(row, "model")} · TP${axis(row, "tp_size")} · E=${axis(row, "experts")}`;
const glyph = (state) => el("span", { cls: `glyph s-${STATES[state].name}`, "aria-hidden": "true" }, STATES[state].glyph);
const collator = new Intl.Collator("en", { numeric: true });
const compare = (a, b) => (a === b ? 0 : a === null || a === undefined || a === "" ? 1 : b === null || b === undefined || b === "" ? -1
  : typeof a === "number" && typeof b === "number" ? a - b : collator.compare(String(a), String(b)));

// Marks: an implementation is a shape and a colour.
const SHAPES = {
  fused: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", reference: "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0",
  vllm: "M-3.6 -3.6h7.2v7.2h-7.2z", flashinfer: "M0 -4.6L4.4 3.4H-4.4z", triton_kernels: "M0 -5L4.6 0L0 5L-4.6 0z",
};
const known = (impl) => (impl in SHAPES ? impl : "other");
function mark(impl, x, y) {
  const path = el("path", { d: SHAPES[impl] || "M-4 -1.2h2.8v-2.8h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8z",
    cls: `m ${impl === "reference" ? "hollow" : ""}` });
  return el("svg", { x, y, width: 1, height: 1, cls: `i-${known(impl)}` }, path);
}
const legendMark = (impl) => el("svg", { width: 12, height: 12, "aria-hidden": "true" }, mark(impl, 6, 6));

// A logarithmic scale over whole decades, as percentages, with its ticks.
function decades(values, write) {
  const positive = values.filter((v) => v > 0);
  if (!positive.length) return null;
  const low = Math.floor(Math.log10(Math.min(...positive)) + 1e-9);
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...positive)) - 1e-9));
  const at = (v) => (100 * (Math.log10(Math.max(v, 10 ** low)) - low)) / (high - low);
  const ticks = [];
  for (let d = low; d <= high; d += 1) ticks.push({ at: at(10 ** d), label: write(10 ** d) });
  return { at, ticks, low, high };
}
const round = (us) => (us >= 1e6 ? `${us / 1e6} s` : us >= 1e3 ? `${us / 1e3} ms` : `${us} µs`);
function ruler(scale, most = window.innerWidth < 760 ? 3 : 6) {
  const step = Math.ceil((scale.ticks.length - 1) / (most - 1));
  return el("svg", { width: "100%", height: 14, "aria-hidden": "true" }, scale.ticks.map((t, i) => (i % step ? null
    : el("text", { x: `${t.at}%`, y: 11, "text-anchor": t.at < 4 ? "start" : t.at > 96 ? "end" : "middle" }, t.label))));
}
function strip(scale, marks, height = 18) {
  const lines = scale.ticks.map((t) => el("line", { cls: "gl", x1: `${t.at}%`, x2: `${t.at}%`, y1: 0, y2: height }));
  return el("svg", { width: "100%", height }, lines, marks);
}
function timeMarks(row, scale, y = 9) {
  const t = row.time;
  const low = t.q1_us ?? t.median_us * (1 - (t.rel_iqr || 0) / 2);
  const high = t.q3_us ?? t.median_us * (1 + (t.rel_iqr || 0) / 2);
  const impl = axis(row, "impl");
  return [el("line", { cls: `iqr i-${known(impl)}`, x1: `${scale.at(low)}%`, x2: `${scale.at(high)}%`, y1: y, y2: y }),
    mark(impl, `${scale.at(t.median_us)}%`, y)];
}

function say(text) {
  $("said").textContent = text;
  $("said").classList.add("on");
  setTimeout(() => $("said").classList.remove("on"), 1600);
}
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    ($("detail").open ? $("detail") : document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("Copied");
}

// Light, dark, or the system's.
const THEMES = ["system", "light", "dark"];
function theme(choice) {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  $("theme").textContent = `Theme: ${choice}`;
  try { localStorage.setItem("theme", choice); } catch { /* a page from disk may have no storage */ }
}
let chosen = "system";
try { chosen = localStorage.getItem("theme") || "system"; } catch { /* as above */ }
theme(THEMES.includes(chosen) ? chosen : "system");
$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || "system";
  theme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});

// Sections draw when they come near the window, and again when the filter changes.
const later = [];
const seen = new IntersectionObserver((entries) => {
  for (const e of entries) if (e.isIntersecting) { const s = later.find((x) => x.node === e.target); s.near = true; if (s.stale) { s.stale = false; s.draw(); } }
}, { rootMargin: "600px" });
function lazily(id, draw) {
  const s = { node: $(id), draw, near: false, stale: true };
  later.push(s);
  seen.observe(s.node);
}
const redraw = () => { for (const s of later) { if (s.near) s.draw(); else s.stale = true; } };
window.addEventListener("beforeprint", () => { for (const s of later) { s.near = true; s.draw(); } });
