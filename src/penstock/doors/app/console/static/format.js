// How numbers, sizes and times are written.

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  while (count >= 1000 && index < units.length - 1) {
    count /= 1000;
    index += 1;
  }
  return `${count >= 100 || index === 0 ? Math.round(count) : count.toPrecision(2)} ${units[index]}`;
}

export function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(value * 1000).toPrecision(2)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export const count = (value) => Math.round(value).toLocaleString("en-US");

export const rate = (value) => (value >= 100 || Number.isInteger(value) ? count(value) : value.toFixed(1));

export const percent = (share) => `${Math.round(share * 100)} %`;

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** Layers as people count them in this project: from 0, the last one included. */
export const layers = ([start, end]) => (end - start === 1 ? `layer ${start}` : `layers ${start}–${end - 1}`);

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
