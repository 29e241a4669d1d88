// SPDX-License-Identifier: Apache-2.0

// The mesh as this node sees it: its own cluster in the middle, each cluster that it follows around, a link to each.

import { ago, byID, count, element } from "/page.js";

const svg = (name, attributes, ...content) => {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...content);
  return e;
};

const signs = { ready: "✓", busy: "…", stale: "!", failed: "✗" };

/** standing is the class of a cluster's state: ready, busy, stale or failed. */
function standing(cluster) {
  if (cluster.configError) return "failed";
  switch (cluster.state) {
    case "ready": return "ready";
    case "connecting": case "syncing": case "draining": return "busy";
    case "stale": return "stale";
    default: return "failed";
  }
}

let chosen = ""; // name of the cluster whose details are shown
let last;

function choose(name) {
  chosen = chosen === name ? "" : name;
  showClusters(last);
}

const narrow = matchMedia("(max-width: 600px)");
narrow.addEventListener("change", () => { drawn = ""; });

const many = 16; // from so many clusters on, only those have names that are not well

/** troubledFirst sorts clusters by how much they need a look. */
const troubledFirst = (clusters) => {
  const order = ["failed", "stale", "busy", "ready"];
  return clusters.toSorted((a, b) => order.indexOf(standing(a)) - order.indexOf(standing(b)) || Number(a.own ?? false) - Number(b.own ?? false) || (a.name < b.name ? -1 : 1));
};

/** refocus gives the focus back to the element of a cluster after its container was filled anew. */
function refocus(container, fill) {
  const held = container.contains(document.activeElement) ? document.activeElement.dataset.cluster : undefined;
  fill();
  if (held !== undefined) container.querySelector(`[data-cluster="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

const middle = { x: 450, y: 280 };

/** places spreads n clusters over ellipses around the middle, at most 16 on the first, more on each further out. */
function places(n) {
  const all = [];
  const rings = n <= 16 ? 1 : n <= 60 ? 2 : 4;
  for (let ring = 0, left = n; ring < rings; ring++) {
    const share = ring === rings - 1 ? left : Math.round((n * (ring + 1)) / ((rings * (rings + 1)) / 2));
    const far = rings === 1 ? 0.78 : 0.45 + (0.5 * ring) / (rings - 1);
    for (let i = 0; i < share; i++) {
      const first = n < 3 ? 0 : -Math.PI / 2; // few clusters stand side by side: the picture is wider than high
      const angle = (2 * Math.PI * i) / share + first + (ring * Math.PI) / Math.max(share, 1);
      all.push({ x: middle.x + 420 * far * Math.cos(angle), y: middle.y + 250 * far * Math.sin(angle) });
    }
    left -= share;
  }
  return { all, radius: Math.max(7, Math.min(72, 84 - 4 * n, 60 - 2 * n + 16)) };
}

function drawCluster(place, radius, name, className, members, lines, onclick) {
  const title = svg("title", {}, lines.join("\n"));
  const group = svg("g", { class: className, transform: `translate(${place.x} ${place.y})` }, title, svg("circle", { class: "body", r: radius }));
  const most = Math.min(members.length, 40);
  for (let i = 0; i < most; i++) {
    const angle = (2 * Math.PI * i) / most - Math.PI / 2;
    group.append(svg("circle", {
      class: "node", r: Math.max(1.5, Math.min(4, radius / 9)),
      cx: (radius - 7) * Math.cos(angle), cy: (radius - 7) * Math.sin(angle),
    }, svg("title", {}, members[i].name)));
  }
  if (radius >= 24) {
    const fits = Math.floor(radius / (narrow.matches ? 9 : 5.5)); // characters; see page.css for their size
    const inside = name.length <= fits;
    if (narrow.matches) {
      group.append(svg("text", { y: 8 }, inside ? name : name.slice(0, fits - 1) + "…"));
    } else {
      group.append(svg("text", { class: "small", y: inside ? 17 : 5 }, lines[1]));
      group.append(inside ? svg("text", { y: -2 }, name) : svg("text", { class: "small tag", y: radius + 17 }, name));
    }
  }
  if (onclick) {
    group.dataset.cluster = name;
    group.setAttribute("tabindex", "0");
    group.setAttribute("role", "button");
    group.setAttribute("aria-label", lines.join(", "));
    group.addEventListener("click", onclick);
    group.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); onclick(); } });
  }
  return group;
}

/** labels names what is not well, above it, as far as no name covers another. */
function labels(clusters, at, radius) {
  const width = narrow.matches ? 14 : 8, height = narrow.matches ? 26 : 16; // of a character, with some room
  const taken = [{ x: middle.x, y: middle.y, w: 80, h: 80 }];
  const order = troubledFirst(clusters.filter((c) => !c.ready));
  return order.flatMap((c) => {
    const place = at[clusters.indexOf(c)];
    const w = width * c.name.length;
    const box = { x: Math.min(Math.max(place.x, w / 2), 2 * middle.x - w / 2), y: place.y - radius - 4, w, h: height };
    if (taken.some((t) => Math.abs(t.x - box.x) < (t.w + w) / 2 && Math.abs(t.y - box.y) < (t.h + height) / 2)) return [];
    taken.push(box);
    return [svg("g", { class: standing(c) }, svg("text", { class: "small tag", x: box.x, y: box.y }, c.name))];
  });
}

let drawn = "";

/** drawMesh draws what has changed since it drew last. */
export function drawMesh(picture, status, nodes) {
  const remotes = status.clusters.filter((c) => !c.own);
  const members = Map.groupBy ? Map.groupBy(nodes, (n) => n.cluster) : new Map();
  const key = JSON.stringify([status.cluster, nodes.length, remotes.map((c) => [c.name, standing(c), c.state, c.lag, c.counts])]);
  if (key === drawn) return;
  drawn = key;
  const { all, radius } = places(remotes.length);
  const links = remotes.map((c, i) => {
    const className = standing(c);
    const { x, y } = all[i];
    const link = svg("line", { class: `link ${className}${c.ready ? "" : " broken"}`, x1: middle.x, y1: middle.y, x2: x, y2: y });
    const parts = [link];
    if (radius >= (narrow.matches ? 60 : 24)) {
      const text = c.ready ? (c.lag ? `${signs[className]} ${c.lag} behind` : `${signs[className]} in step`) : `${signs[className]} ${c.state}`;
      parts.push(svg("text", { class: "small tag", x: middle.x + (x - middle.x) * 0.52, y: middle.y + (y - middle.y) * 0.52 + 5 }, text));
    }
    return svg("g", { class: className + (c.ready && remotes.length > many ? " faint" : "") }, ...parts);
  });
  const bodies = remotes.map((c, i) => {
    const lines = [`${c.name} (${c.id})`, count(c.counts.nodes, "node", "nodes"), `${c.state} for ${ago(c.since)}`, count(c.counts.ips, "address", "addresses")];
    return drawCluster(all[i], radius, c.name, standing(c), members.get(c.name) ?? [], lines, () => choose(c.name));
  });
  // What is wrong is drawn above the rest, and with its name if there is no room for all.
  const names = radius >= 24 ? [] : labels(remotes, all, radius);
  links.sort((a, b) => Number(!a.classList.contains("faint")) - Number(!b.classList.contains("faint")));
  const own = members.get(status.cluster.name) ?? [];
  const self = drawCluster(middle, Math.max(radius + 10, 34), status.cluster.name, "own", own,
    [`${status.cluster.name} (${status.cluster.id})`, count(own.length, "node", "nodes"), "the cluster of this node"]);
  picture.setAttribute("viewBox", remotes.length < 3 ? "0 110 900 340" : "0 0 900 560");
  refocus(picture, () => picture.replaceChildren(...links, ...bodies, self, ...names));
}

const sum = (counts) => Object.values(counts ?? {}).reduce((a, b) => a + b, 0);

/** showClusters fills the table, and the details of the cluster that was chosen. */
export function showClusters(status) {
  last = status;
  const rows = troubledFirst(status.clusters).map((c) => {
    const className = standing(c);
    const name = element("button", "plain", c.own ? `${c.name} (own)` : c.name);
    name.type = "button";
    name.dataset.cluster = c.name;
    name.setAttribute("aria-expanded", String(c.name === chosen));
    const row = element("tr", `choice${c.name === chosen ? " chosen" : ""}`,
      element("td", "", name),
      element("td", "line " + className, `${signs[className]} ${c.state}`),
      element("td", "time", ago(c.since)),
      ...[c.lag ?? 0, c.counts.nodes, c.counts.ips, c.counts.identities, c.counts.services, sum(c.rejected)].map((n) => element("td", "number", n)));
    row.addEventListener("click", () => choose(c.name));
    return row;
  });
  refocus(byID("rows"), () => byID("rows").replaceChildren(...rows));
  const detail = byID("detail");
  const c = status.clusters.find((c) => c.name === chosen);
  detail.hidden = !c;
  if (!c) return;
  const list = element("dl", "");
  const add = (name, value) => { if (value !== undefined && value !== "" && value !== null) list.append(element("dt", "", name), element("dd", "", value)); };
  add("config file", c.configFile);
  add("config error", c.configError);
  add("endpoints", (c.endpoints ?? []).join(", "));
  add("etcd", [c.serverVersion, c.etcdClusterID].filter(Boolean).join(", cluster "));
  add("warning", c.warning);
  add("revision", c.revision);
  add("canaries", c.canaries ? "yes" : "no");
  add("last answer", c.lastSuccess && `${ago(c.lastSuccess)} ago`);
  add("stale for", ago(c.staleSince));
  add("reconnects", c.reconnects);
  add("conflicts", c.conflicts && `${c.conflicts}: see weft ip conflicts`);
  add("certificates", [...new Set((c.certificates ?? []).map((x) => `${x.role} until ${x.notAfter.slice(0, 10)}`))].join(", "));
  add("last error", c.lastError && `${c.lastError} (${ago(c.lastErrorAt)} ago)`);
  for (const w of c.certificateWarnings ?? []) add("certificate", w);
  for (const [reason, n] of Object.entries(c.rejected ?? {})) add("refused", `${reason}: ${n}`);
  for (const r of (c.lastRejections ?? []).slice(0, 5)) add(`${r.kind} ${r.key}`, r.reason);
  detail.replaceChildren(element("h2", "", c.name), list);
}
