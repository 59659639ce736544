// After page_base.js: the theme, and the losses under the pointer.

startTheme();
$("theme").hidden = false;

/** The point of a curve whose step is nearest. Points are sorted by step. */
function nearest(points, step) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle;
    else high = middle;
  }
  return step - points[low][0] <= points[high][0] - step ? points[low] : points[high];
}

/** Show the numbers nearest to the pointer. */
function startChart(chart, losses) {
  const [cross, tip] = [$("cross"), $("tip")];
  const longest = losses.curves.reduce((a, b) => (a.points.length >= b.points.length ? a : b));
  const show = (event) => {
    const box = chart.getBoundingClientRect();
    const place = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const [step] = nearest(longest.points, losses.first + place * (losses.last - losses.first));
    const lines = [`step ${step.toLocaleString("en")}`];
    for (const curve of losses.curves) {
      const [at, loss] = nearest(curve.points, step);
      lines.push(`${curve.name} ${loss.toFixed(4)}${at === step ? "" : ` (step ${at.toLocaleString("en")})`}`);
    }
    tip.textContent = lines.join("\n");
    cross.hidden = tip.hidden = false;
    const left = ((step - losses.first) / Math.max(1, losses.last - losses.first)) * box.width;
    cross.style.left = `${left}px`;
    const room = box.width - tip.offsetWidth;
    const beside = left + 10 <= room ? left + 10 : left - 10 - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
  };
  chart.addEventListener("pointermove", show);
  chart.addEventListener("pointerdown", show);
  chart.addEventListener("pointerleave", () => {
    cross.hidden = tip.hidden = true;
  });
}

if ($("losses")) startChart($("chart"), JSON.parse($("losses").textContent));
