// A plot of the last hour, drawn by uPlot; its newest values are beside it as text.

import { html, useEffect, useRef } from "../vendor/preact-htm.js";
import uPlot from "../vendor/uplot.js";

const HEIGHT = 168;
const SHORTEST = 60; // seconds that a plot shows at least
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// A canvas does not know light-dark(): the browser resolves it where a colour is used.
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = css(name);
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const LINES = ["--accent", "--warn"];
const SYSTEM_THEME = matchMedia("(prefers-color-scheme: dark)");

export function Plot({ title, lines, format, history, minimum = 1 }) {
  const place = useRef();
  const plot = useRef();
  const names = lines.map(([name]) => name);
  useEffect(() => {
    const make = () => {
      const muted = colour("--muted");
      const grid = { stroke: colour("--line"), width: 1 };
      return new uPlot(
        {
          width: place.current.clientWidth,
          height: HEIGHT,
          padding: [8, 6, 0, 0],
          legend: { show: false },
          cursor: { y: false, drag: { x: false, y: false } },
          scales: {
            x: { range: (_, first, last) => [Math.min(first, last - SHORTEST), last] },
            y: { range: (_, __, most) => [0, Math.max(minimum, (most ?? 0) * 1.1)] },
          },
          axes: [
            { stroke: muted, grid: { show: false }, ticks: { show: false }, font: "11px Inter, sans-serif", size: 26, space: 70, values: (_, marks) => marks.map(clocks(marks)) },
            { stroke: muted, grid, ticks: { show: false }, font: "11px Inter, sans-serif", size: 54, space: 34, values: (_, marks) => marks.map(format) },
          ],
          series: [{}, ...lines.map(([, label], index) => ({ label, stroke: colour(LINES[index]), width: 1.6, points: { show: false } }))],
        },
        history.series(names),
        place.current,
      );
    };
    plot.current = make();
    const again = () => {
      plot.current.destroy();
      plot.current = make();
    };
    const fit = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    fit.observe(place.current);
    const themes = new MutationObserver(again);
    themes.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    SYSTEM_THEME.addEventListener("change", again);
    return () => {
      fit.disconnect();
      themes.disconnect();
      SYSTEM_THEME.removeEventListener("change", again);
      plot.current.destroy();
    };
  }, [history]);
  useEffect(() => plot.current?.setData(history.series(names)));
  const values = lines.map(([name, label]) => [label, history.latest(name)]);
  return html`<section class="card plot" aria-label=${title}>
    <header>
      <h2>${title}</h2>
      <div class="row small">
        ${values.map(
          ([label, value], index) => html`<span class="key" key=${label}><i class="line-${index}"></i>${label} <strong class="number">${value === null ? "–" : format(value)}</strong></span>`,
        )}
      </div>
    </header>
    <div ref=${place} role="img" aria-label=${`${title} of the last hour`}></div>
  </section>`;
}

/** Times of an axis; with seconds where its marks are less than a minute apart. */
function clocks(marks) {
  const second = marks[1] - marks[0] < 60 ? "2-digit" : undefined;
  return (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second, hourCycle: "h23" });
}
