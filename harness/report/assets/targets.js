// The same weights for two targets or more; and the code metrics of each target and triton version.
const hws = [...new Set(D.targets.flatMap((t) => Object.keys(t[4])))].sort(compare);
const favourite = (...names) => names.find((n) => hws.includes(n));
const picked = new Set([favourite("gfx950", "gfx942", "gfx1250"), favourite("h200", "h100")].filter(Boolean));
for (const hw of hws) if (picked.size < 2) picked.add(hw);
let allSides = false;
function sides() {
  if (!D.targets.length) { $("sides").replaceChildren(el("p", { cls: "none" }, "No preparation was done for two targets.")); return; }
  const boxes = hws.map((hw) => el("label", {}, el("input", { type: "checkbox", checked: picked.has(hw), on: { change: (e) => { if (e.target.checked) picked.add(hw); else picked.delete(hw); sides(); } } }), ` ${hw}`));
  const only = hws.filter((hw) => picked.has(hw));
  const rows = D.targets.filter((t) => only.filter((hw) => hw in t[4]).length >= Math.min(2, only.length) && Object.values(t[4]).some(inView));
  const tensors = (row) => Object.entries(field(row, "layouts") || {}).map(([k, l]) => [k, l.name]);
  const cell = (t, hw) => {
    if (!(hw in t[4])) return [el("td", { colspan: 3, cls: "none" }, "not in the run")];
    const row = ROWS[t[4][hw]];
    const rest = only.filter((o) => o !== hw && o in t[4]).map((o) => Object.fromEntries(tensors(ROWS[t[4][o]])));
    const differs = tensors(row).some(([k, v]) => rest.some((o) => k in o && o[k] !== v));
    const layouts = Object.entries(field(row, "layouts") || {}).map(([k, l]) => el("li", {}, `${k}: `, el("code", {}, String(l.name)),
      l.pad_bytes ? el("span", { cls: "pad" }, " + ", value(row, `layouts.${k}.pad_bytes`, "pad_bytes", l.pad_bytes), " padding") : ""));
    const m = field(row, "memory");
    const b = field(row, "bound");
    return [el("td", { cls: differs ? "l diff" : "l" }, glyph(row.state), STATES[row.state].name === "ok" || STATES[row.state].name === "padded" ? [el("ul", {}, layouts), because(row)] : `${STATES[row.state].name}: ${why(row)}`),
      el("td", { cls: "r" }, m && m.output_bytes !== undefined ? numbered(row, "memory.output_bytes", m.output_bytes, bytes) : absent(row, "memory")),
      el("td", { cls: "r" }, row.time ? median(row) : b && b.floor_us ? ["at least ", numbered(row, "bound.floor_us", b.floor_us, duration)] : absent(row, "time"))];
  };
  const head = el("thead", {}, el("tr", {}, ["path", "model", "TP", "experts"].map((t) => el("th", { rowspan: 2 }, t)), only.map((hw) => el("th", { colspan: 3 }, hw))),
    el("tr", {}, only.flatMap(() => ["layouts and padding", "result", "time, or bound"].map((t) => el("th", {}, t)))));
  if (!rows.length) { $("sides").replaceChildren(el("div", { cls: "opts" }, "Targets:", boxes), el("p", { cls: "none" }, "No preparation meets the filter.")); return; }
  const limit = allSides ? rows.length : 40;
  const body = el("tbody", {}, rows.slice(0, limit).map((t) => el("tr", {}, el("td", {}, t[0]), el("td", {}, t[1]), el("td", { cls: "r" }, String(t[2])), el("td", { cls: "r" }, String(t[3])), only.flatMap((hw) => cell(t, hw)))));
  $("sides").replaceChildren(el("div", { cls: "opts" }, "Targets:", boxes, el("span", { cls: "none" }, "A bar at a cell's left: the targets take different layouts.")), el("div", { cls: "scroll" }, el("table", { cls: "tight" }, head, body)),
    rows.length > limit ? el("button", { type: "button", on: { click: () => { allSides = true; sides(); } } }, `Show all ${rows.length}`) : "");
}

function because(row) {
  const d = field(row, "decisions") || {};
  const told = [d.reason, d.source && `rule: ${d.source}`].filter(Boolean).join("; ");
  return told ? el("p", { cls: "because" }, told) : null;
}

let allMetrics = false;
function metrics() {
  const { columns, metrics: every } = D.code;
  if (!every.length) { $("metrics").replaceChildren(el("p", { cls: "none" }, "No row has code metrics.")); return; }
  const base = columns.map(([hw]) => columns.findIndex(([other]) => other === hw));
  const several = base.some((b, i) => b !== i);
  const shown = every.filter((m) => m[2].some((c) => c && inView(c[0])) && (allMetrics || !several || m[3]));
  const targets = [];
  for (const [hw] of columns) { if (targets.length && targets[targets.length - 1][0] === hw) targets[targets.length - 1][1] += 1; else targets.push([hw, 1]); }
  const heat = (m, i) => {
    const c = m[2][i];
    if (!c) return el("td", { cls: "heat" }, "");
    const first = m[2][base[i]];
    const [row, path, v] = [ROWS[c[0]], c[1], c[2]];
    let style = null;
    let delta = null;
    if (first && base[i] !== i && first[2] !== v) {
      const change = first[2] ? v / first[2] - 1 : 1;
      const strength = Math.min(0.5, 0.1 + Math.abs(change) * 0.4);
      style = `background:rgb(var(--${v > first[2] ? "up" : "down"}) / ${strength.toFixed(2)})`;
      delta = el("span", { cls: "delta" }, v > first[2] ? "▲" : "▼", first[2] ? num(`${Math.abs(100 * change).toFixed(0)}%`, `change:${source(ROWS[first[0]], first[1])}/${source(row, path)}`) : " from 0");
    }
    return el("td", { cls: "heat", style }, num(write(m[1], v), source(row, path)), delta);
  };
  const head = el("thead", {}, el("tr", {}, el("th", { rowspan: 2 }, "metric"), targets.map(([hw, n]) => el("th", { colspan: n }, hw))), el("tr", {}, columns.map(([, t]) => el("th", { cls: "r" }, `triton ${t}`))));
  const limit = 200;
  const body = el("tbody", {}, shown.slice(0, limit).map((m, j) => [j && shown[j - 1][0] === m[0] ? null : el("tr", {}, el("th", { cls: "kernel", colspan: columns.length + 1 }, m[0])),
    el("tr", {}, el("td", {}, m[1]), columns.map((_, i) => heat(m, i)))]));
  $("metrics").replaceChildren(el("div", { cls: "opts" }, several ? el("label", {}, el("input", { type: "checkbox", checked: allMetrics, on: { change: (e) => { allMetrics = e.target.checked; metrics(); } } }), " also what did not change") : "",
    el("span", { cls: "none" }, `${shown.length} of ${every.length} metrics${shown.length > limit ? `, the first ${limit} drawn` : ""}. ▲ more, ▼ less than the target's oldest version; blank: none.`)),
  shown.length ? el("div", { cls: "scroll" }, el("table", {}, head, body)) : el("p", { cls: "none" }, "No metric changed between versions."));
}
lazily("targets", sides);
lazily("code", metrics);
apply();
