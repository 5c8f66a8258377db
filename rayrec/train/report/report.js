// Moving over one chart shows the values at that step in all of them. The page is complete without this script.
const [left, right, top, bottom, width, height] = [52, 14, 18, 28, 560, 250];
const charts = [...document.querySelectorAll("svg[data-hover]")];
const make = (parent, name) => parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
const nearest = (points, step) => points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));

function show(step) {
  for (const svg of charts) {
    svg.querySelector(".cursor")?.remove();
    if (step === null) continue;
    const data = JSON.parse(svg.dataset.hover);
    const points = data.curve.length ? data.curve : data.dots;
    if (!points.length) continue;
    const [at, value] = nearest(points, step);
    const x = left + (at / +svg.dataset.last) * (width - left - right);
    const cursor = make(svg, "g");
    cursor.setAttribute("class", "cursor");
    cursor.style.pointerEvents = "none";
    const line = make(cursor, "line");
    for (const [key, v] of [["x1", x], ["x2", x], ["y1", top], ["y2", height - bottom]]) line.setAttribute(key, v);
    const text = make(cursor, "text");
    text.textContent = `step ${at.toLocaleString()}: ${value}`;
    text.setAttribute("x", x > width / 2 ? x - 7 : x + 7);
    text.setAttribute("y", top + 10);
    text.setAttribute("text-anchor", x > width / 2 ? "end" : "start");
  }
}

for (const svg of charts) {
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right);
    show(share < 0 || share > 1 ? null : share * +svg.dataset.last);
  });
  svg.addEventListener("mouseleave", () => show(null));
}
