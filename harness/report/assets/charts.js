// Times by cell, times against experts, and before against after.
const timed = () => visible.filter((r) => r.time);
const inView = (i) => shownRows.has(i);
function noTimes(node, what) {
  const codes = {};
  for (const r of visible) if (!r.time) codes[absent(r, "time") || "?"] = (codes[absent(r, "time") || "?"] || 0) + 1;
  const told = Object.entries(codes).map(([c, n]) => `${n} ${c}${D.absent[c] ? ` (${D.absent[c]})` : ""}`).join("; ");
  node.replaceChildren(el("p", { cls: "none" }, what + (told ? ` Not timed: ${told}.` : "")));
}
const LIMIT = 30;
let more = 0;
function times() {
  const rows = timed();
  if (!rows.length) { noTimes($("times"), "No cell in view has a time."); return; }
  const scale = scaleOf(rows.flatMap((r) => [r, today(r)].filter(Boolean)));
  const groups = new Map();
  for (const r of rows) {
    const key = JSON.stringify([caseOf(r), D.axes.filter((a) => a !== "impl" && a !== "env").map((a) => axis(r, a)), r.time.device]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(...[r, today(r)].filter(Boolean));
  }
  const sorted = [...groups.values()].sort((a, b) => compare(axis(a[0], "path"), axis(b[0], "path")) || compare(axis(a[0], "model"), axis(b[0], "model")) || compare(axis(a[0], "tp_size"), axis(b[0], "tp_size")) || compare(axis(a[0], "experts"), axis(b[0], "experts")));
  const top = Math.max(1, ...rows.map((r) => r.time.copy_fraction || 0));
  const lines = [el("div", { cls: "thead" }, el("span", {}, "implementation"), ruler(scale), el("span", { cls: "r" }, "median"), el("span", { cls: "r", title: "interquartile range over the median" }, "IQR"), el("span", {}, "fraction of copy speed"), el("span", {}), el("span", { cls: "r" }, "memory"))];
  for (const group of sorted.slice(0, LIMIT + more)) {
    lines.push(el("div", { cls: "tgroup" }, el("b", {}, name(group[0])), `  ${group[0].time.device}${group[0].time.cache ? `, ${group[0].time.cache} cache` : ""}`));
    for (const r of group.sort((a, b) => b.time.median_us - a.time.median_us)) lines.push(line(r, scale, top));
  }
  const box = el("div", { cls: "box" }, lines);
  $("times").replaceChildren(box);
  if (sorted.length > LIMIT + more) box.after(el("p", { cls: "none" }, el("button", { type: "button", on: { click: () => { more += 100; times(); } } }, `Show more: ${sorted.length - LIMIT - more} groups are left`)));
}
function line(r, scale, top) {
  const impl = axis(r, "impl");
  const f = r.time.copy_fraction;
  const bar = f === undefined || f === null ? null : el("svg", { width: "100%", height: 12 },
    el("rect", { cls: "track2", width: `${100 / top}%`, height: 8, y: 2 }), el("rect", { cls: `fill i-${known(impl)}`, width: `${(100 * f) / top}%`, height: 8, y: 2 }));
  const env = axis(r, "env");
  return el("div", { cls: "trow", title: source(r, "time") }, el("span", { cls: `name` }, el("span", { cls: `i-${known(impl)}` }, legendMark(impl)), impl + (env && env !== "current" ? ` (${env})` : "")),
    strip(scale, timeMarks(r, scale)), el("span", { cls: "r" }, median(r)), el("span", { cls: "r dim" }, numbered(r, "time.rel_iqr", r.time.rel_iqr, (v) => `${digits(100 * v, 2)} %`)), el("span", {}, bar), el("span", { cls: "r" }, fraction(r)), el("span", { cls: "r" }, memory(r) || absent(r, "memory")));
}

function slopes() {
  const shown = D.slopes.filter((s) => s[3].some(inView));
  if (!shown.length) {
    $("slopes").replaceChildren(el("p", { cls: "none" }, D.slopes.length ? "No series meets the filter." : "No preparation was timed at three expert counts or more."));
    return;
  }
  const panels = new Map();
  for (const s of shown) { if (!panels.has(s[0])) panels.set(s[0], []); panels.get(s[0]).push(s); }
  const [W, H, L, B] = [270, 170, 42, 20];
  $("slopes").replaceChildren(...[...panels].map(([label, series]) => {
    const points = series.map((s) => s[3].map((i) => [axis(ROWS[i], "experts"), ROWS[i].time.median_us]));
    const y = decades(points.flat().map((p) => p[1]), round);
    const es = [...new Set(points.flat().map((p) => p[0]))].sort((a, b) => a - b);
    const [lo, hi] = [Math.log(es[0]), Math.log(es[es.length - 1])];
    const px = (e) => L + ((W - L - 10) * (Math.log(e) - lo)) / (hi - lo || 1);
    const py = (t) => (H - B) - ((H - B - 8) * y.at(t)) / 100;
    const grid = y.ticks.map((t) => el("line", { cls: "gl", x1: L, x2: W, y1: (H - B) - ((H - B - 8) * t.at) / 100, y2: (H - B) - ((H - B - 8) * t.at) / 100 }));
    const names = y.ticks.map((t) => el("text", { x: L - 5, y: (H - B) - ((H - B - 8) * t.at) / 100 + 4, "text-anchor": "end" }, t.label));
    const ticks = es.map((e) => el("text", { x: px(e), y: H - 4, "text-anchor": "middle" }, String(e)));
    const drawn2 = series.map((s, i) => [el("polyline", { fill: "none", cls: `i-${known(s[1])}`, stroke: "currentColor", "stroke-width": 1.5, points: points[i].map(([e, t]) => `${px(e)},${py(t)}`).join(" ") }),
      points[i].map(([e, t]) => mark(s[1], px(e), py(t)))]);
    const said = series.map((s) => el("span", { cls: "name" }, el("span", { cls: `i-${known(s[1])}` }, legendMark(s[1])), `${s[1]} slope `, num(digits(s[2]), `slope:${s[3].map((i) => source(ROWS[i], "time.median_us")).join(",")}`)));
    return el("figure", {}, el("figcaption", {}, label), el("svg", { viewBox: `0 0 ${W} ${H}`, width: "100%", role: "img", "aria-label": `${label}: time against experts` }, grid, names, ticks, drawn2.flat(2)), el("p", {}, said));
  }));
}

function before() {
  const shown = D.pairs.filter(([, b]) => inView(b));
  if (!shown.length) {
    $("pairs").replaceChildren(el("p", { cls: "none" }, D.pairs.length ? "No pair meets the filter." : "No cell was timed both by a vendor (or the reference) and by the fused routines on one device."));
    return;
  }
  const ends = ([a, b, , , vendor]) => [vendor ? today(ROWS[a]) : ROWS[a], ROWS[b]];
  const scale = scaleOf(shown.flatMap(ends));
  const lines = shown.slice(0, 120).map((pair) => {
    const [x, y] = ends(pair);
    const [, , ratio, same] = pair;
    const [from, to] = [`${scale.at(x.time.median_us)}%`, `${scale.at(y.time.median_us)}%`];
    return el("div", { cls: "prow" }, el("span", {}, name(y)),
      strip(scale, [el("line", { cls: "link", x1: from, x2: to, y1: 9, y2: 9 }), mark(axis(x, "impl"), from, 9), mark(axis(y, "impl"), to, 9)]),
      el("span", {}, el("span", { cls: "name" }, el("span", { cls: `i-${known(axis(x, "impl"))}` }, legendMark(axis(x, "impl"))), axis(x, "impl"), " ", median(x)), el("span", { cls: "name" }, el("span", { cls: "i-fused" }, legendMark("fused")), "fused ", median(y))),
      el("b", { cls: "r" }, num(`${digits(ratio)}x`, `ratio:${source(x, "time.median_us")}/${source(y, "time.median_us")}`)),
      el("span", {}, memory(x) || "no memory", " → ", memory(y) || "not measured"),
      el("span", { title: "by the digests that both rows have, or both equal to the reference" }, same === null ? "○ not compared" : same ? "✓ same bytes" : "✕ other bytes"));
  });
  $("pairs").replaceChildren(el("div", { cls: "box" }, el("div", { cls: "prow head" }, el("span", {}, "cell"), ruler(scale), el("span", {}, "median"), el("span", { cls: "r" }, "gain"), el("span", {}, "memory beyond the input"), el("span", {}, "result")), lines),
    shown.length > 120 ? el("p", { cls: "none" }, `The 120 largest gains of ${shown.length}; filter to see others.`) : "");
}
lazily("time", times);
lazily("experts", slopes);
lazily("before", before);
