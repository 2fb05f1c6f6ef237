const root = document.documentElement;
const button = document.getElementById("theme");
const themes = ["system", "light", "dark"];
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % 3];
  if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
  button.textContent = `Theme: ${next}`;
});
const cards = [...document.querySelectorAll("article")];
document.getElementById("q").addEventListener("input", (e) => {
  const words = e.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const card of cards) {
    const text = card.dataset.words.toLowerCase();
    card.hidden = !words.every((w) => text.includes(w));
    if (!card.hidden) shown += 1;
  }
  document.getElementById("shown").textContent = `${shown} of ${cards.length} layouts`;
  for (const section of document.querySelectorAll("section")) section.hidden = ![...section.querySelectorAll("article")].some((c) => !c.hidden);
});
// Pointing at a cell marks the same element on the other side.
let marked = [];
document.addEventListener("pointerover", (e) => {
  const cell = e.target.closest && e.target.closest("svg.layout .c[data-o]");
  for (const m of marked) m.classList.remove("on");
  marked = cell ? [...cell.ownerSVGElement.querySelectorAll(`.c[data-o="${cell.dataset.o}"]`)] : [];
  for (const m of marked) m.classList.add("on");
});
