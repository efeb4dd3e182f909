// Readable numbers, times and names; and DOM elements built without HTML, so that text from peers stays text.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(made.dataset, value);
    else if (name.startsWith("aria-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const shortName = (peer) => `…${peer.slice(-8)}`;

const SCALES = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]];

export function count(number) {
  if (number === null) return "–";
  if (number < 10000) return Math.round(number).toLocaleString("en");
  const [scale, unit] = SCALES.find(([scale]) => number >= scale);
  return (number / scale).toFixed(number / scale < 100 ? 1 : 0) + unit;
}

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const ago = (seconds) => (seconds < 3 ? "now" : `${duration(Math.max(0, Math.round(seconds)))} ago`);

export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// A share as a CSS size, clamped to 0–100 %.
export const size = (share) => `${(100 * Math.max(0, Math.min(1, share))).toFixed(2)}%`;

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
