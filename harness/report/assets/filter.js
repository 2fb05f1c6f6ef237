// The filter: words in any field, one choice per axis, one state. `visible` is what the page shows.
const CHOICES = ["hw", "model", "path", "tp_size", "impl", "env", "experts"];
const LABELS = { hw: "target", tp_size: "TP" };
const wanted = {};
let visible = ROWS;
let shownRows = new Set(ROWS.keys());
const haystacks = new Map();
function haystack(row) {
  if (!haystacks.has(row)) {
    const words = [...row.axes.map((i) => D.pool[i]), STATES[row.state].name, field(row, "status"), field(row, "reason"),
      field(row, "time_absent"), row.time && row.time.device, JSON.stringify(field(row, "layouts"))];
    haystacks.set(row, words.join(" ").toLowerCase());
  }
  return haystacks.get(row);
}
function apply() {
  const words = $("q").value.toLowerCase().split(/\s+/).filter(Boolean);
  const axes = CHOICES.filter((a) => wanted[a] !== undefined);
  visible = ROWS.filter((row) => axes.every((a) => String(axis(row, a)) === wanted[a])
    && (wanted.state === undefined || STATES[row.state].name === wanted.state)
    && words.every((w) => haystack(row).includes(w)));
  shownRows = new Set(visible.map((row) => row.i));
  $("shown").textContent = `${visible.length} of ${ROWS.length} cells shown`;
  for (const chip of document.querySelectorAll(".chip")) chip.setAttribute("aria-pressed", String(chip.dataset.state === wanted.state));
  for (const select of $("selects").children) {
    select.value = wanted[select.dataset.axis] ?? "";
    select.classList.toggle("on", select.value !== "");
  }
  redraw();
}
function find(choices) {
  for (const key of Object.keys(wanted)) delete wanted[key];
  Object.assign(wanted, choices);
  $("q").value = "";
  apply();
  $("cells").scrollIntoView();
}
for (const a of CHOICES) {
  const values = [...new Set(ROWS.map((row) => axis(row, a)))].filter((v) => v !== null).sort(compare);
  if (values.length < 2) continue;
  const label = LABELS[a] || a;
  const select = el("select", { "aria-label": label, "data-axis": a }, el("option", { value: "" }, `${label}: all`),
    values.map((v) => el("option", { value: String(v) }, `${label}: ${v}`)));
  select.addEventListener("change", () => {
    if (select.value === "") delete wanted[a]; else wanted[a] = select.value;
    apply();
  });
  $("selects").append(select);
}
let typing = 0;
$("q").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(apply, 120); });
$("filters").addEventListener("submit", (e) => e.preventDefault());
$("filters").addEventListener("reset", () => {
  for (const key of Object.keys(wanted)) delete wanted[key];
  setTimeout(apply);
});
for (const chip of document.querySelectorAll(".chip")) {
  chip.addEventListener("click", () => {
    if (wanted.state === chip.dataset.state) delete wanted.state; else wanted.state = chip.dataset.state;
    apply();
  });
}
for (const button of document.querySelectorAll("[data-find]")) {
  button.addEventListener("click", () => find(JSON.parse(button.dataset.find)));
}
