// Where peers are, of those whose owners want it known: a coarse map of our own, and a list that says the same.

import { shape } from "./charts.js";
import { element, shortName } from "./format.js";

// Coasts, in whole degrees east and north.
const COASTS = [
  "-167,65 -156,71 -128,70 -110,68 -95,72 -82,68 -94,59 -88,56 -80,52 -77,62 -65,59 -56,52 -65,45 -70,42 -75,36 -81,31 " +
    "-80,26 -83,30 -90,30 -97,27 -97,21 -91,18 -87,21 -88,16 -83,15 -82,9 -79,8 -85,11 -95,16 -105,20 -112,27 -117,33 " +
    "-121,35 -124,42 -124,48 -133,56 -145,60 -153,58 -162,59",
  "-45,60 -53,66 -55,70 -68,77 -60,82 -30,83 -18,78 -22,70 -38,65",
  "-79,9 -72,12 -62,10 -51,4 -50,0 -44,-2 -35,-6 -39,-14 -41,-22 -48,-26 -53,-33 -57,-37 -62,-39 -65,-43 -69,-51 " +
    "-72,-54 -75,-50 -73,-40 -71,-30 -70,-19 -76,-14 -81,-6 -80,1 -77,4",
  "-6,36 10,37 11,33 20,31 32,31 35,27 37,21 43,12 51,12 47,4 40,-4 40,-15 35,-24 32,-29 27,-34 18,-34 12,-18 13,-8 " +
    "9,0 9,4 4,6 -8,5 -13,9 -17,14 -17,21 -13,28",
  "-9,37 -9,43 -1,44 -4,48 2,51 8,54 8,57 11,59 5,60 14,68 25,71 40,67 60,69 70,73 80,73 104,78 113,74 140,73 160,70 " +
    "180,69 178,62 163,60 162,55 156,51 156,58 142,59 135,54 141,52 140,48 132,43 128,40 129,35 126,35 125,39 118,39 " +
    "122,37 119,35 122,31 120,26 114,22 108,21 106,19 109,12 105,9 100,13 103,1 98,8 98,16 94,16 91,22 87,21 80,15 " +
    "80,10 77,8 73,16 72,21 67,25 57,26 48,30 52,24 56,24 60,22 52,16 44,13 42,16 35,28 34,32 36,36 28,37 26,40 24,38 " +
    "22,37 19,42 13,45 16,41 18,40 16,38 10,44 3,43 0,40 -2,37",
  "-5,50 1,51 0,53 -2,56 -4,58 -6,56 -3,54 -5,52", "-10,52 -6,52 -6,55 -10,54", "-24,65 -16,66 -14,65 -19,63 -22,64",
  "130,31 135,34 140,35 142,40 141,42 145,44 142,45 140,42 139,38 132,35",
  "114,-22 114,-34 118,-35 124,-33 131,-31 138,-35 141,-38 147,-38 150,-37 153,-31 153,-26 146,-19 142,-11 140,-17 " +
    "136,-12 131,-12 126,-14 122,-18",
  "173,-35 178,-38 175,-41 171,-44 168,-46 167,-45 172,-41 174,-39", "95,5 104,-2 106,-6 102,-4", "105,-7 114,-8 106,-6",
  "109,1 117,7 119,5 117,0 116,-4 110,-3", "131,-1 141,-3 147,-6 150,-10 143,-8 138,-8 134,-4",
  "49,-12 50,-16 47,-25 44,-24 44,-16", "120,18 122,14 126,7 123,9 120,14", "80,10 82,7 80,6",
];
const NORTH = 84, SOUTH = -58; // beyond, nobody trains
const SMALLEST = 3, LARGEST = 9; // of a dot's radius

const said = (degrees, plus, minus) => `${Math.abs(degrees)}° ${degrees < 0 ? minus : plus}`;
const nameOf = ({ north, east }) => `${said(north, "N", "S")} ${said(east, "E", "W")}`;

export function drawWorld(map, list, { places }) {
  const land = COASTS.map((coast) => shape("polygon", { class: "land", points: coast.replace(
    /(-?\d+),(-?\d+)/g, (_, east, north) => `${Number(east) + 180},${NORTH - north}`) }));
  const dots = places.map((place) => shape("circle", {
    class: "here", cx: place.east + 180, cy: NORTH - Math.max(SOUTH, Math.min(NORTH, place.north)),
    r: Math.min(LARGEST, SMALLEST * Math.sqrt(place.peers)),
  }));
  map.replaceChildren(shape("svg", { viewBox: `0 0 360 ${NORTH - SOUTH}`, "aria-hidden": "true" }));
  map.firstChild.append(...land, ...dots);
  list.replaceChildren(...places.map((place) => element("li", {}, element("span", { textContent: nameOf(place) }),
    element("span", { className: "mono", textContent:
      place.names.map(shortName).join(" ") + (place.peers > place.names.length ? ` and ${place.peers - place.names.length} more` : "") }))));
}
