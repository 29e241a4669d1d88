// SPDX-License-Identifier: Apache-2.0

// The mesh as this node sees it: its own cluster in the middle, each cluster that it follows around, a link to each.

import { ago, byID, element } from "/page.js";

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
    const fits = Math.floor(radius / 4);
    const short = name.length > fits ? name.slice(0, fits - 1) + "…" : name;
    group.append(svg("text", { y: -2 }, short), svg("text", { class: "small", y: 17 }, lines[1]));
  }
  if (onclick) {
    group.setAttribute("tabindex", "0");
    group.setAttribute("role", "button");
    group.setAttribute("aria-label", lines.join(", "));
    group.addEventListener("click", onclick);
    group.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); onclick(); } });
  }
  return group;
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
    if (radius >= 24) {
      const text = c.ready ? (c.lag ? `${signs[className]} ${c.lag} behind` : `${signs[className]} in step`) : `${signs[className]} ${c.state}`;
      parts.push(svg("text", { class: "small tag", x: middle.x + (x - middle.x) * 0.52, y: middle.y + (y - middle.y) * 0.52 + 5 }, text));
    }
    return svg("g", { class: className }, ...parts);
  });
  const bodies = remotes.map((c, i) => {
    const lines = [`${c.name} (${c.id})`, `${c.counts.nodes} nodes`, `${c.state} for ${ago(c.since)}`, `${c.counts.ips} addresses`];
    return drawCluster(all[i], radius, c.name, standing(c), members.get(c.name) ?? [], lines, () => choose(c.name));
  });
  const own = members.get(status.cluster.name) ?? [];
  const self = drawCluster(middle, Math.max(radius + 10, 34), status.cluster.name, "own", own,
    [`${status.cluster.name} (${status.cluster.id})`, `${own.length} node${own.length === 1 ? "" : "s"}`, "the cluster of this node"]);
  picture.setAttribute("viewBox", remotes.length < 3 ? "0 110 900 340" : "0 0 900 560");
  picture.replaceChildren(...links, ...bodies, self);
}

const sum = (counts) => Object.values(counts ?? {}).reduce((a, b) => a + b, 0);

/** showClusters fills the table, and the details of the cluster that was chosen. */
export function showClusters(status) {
  last = status;
  byID("rows").replaceChildren(...status.clusters.map((c) => {
    const className = standing(c);
    const row = element("tr", `choice${c.name === chosen ? " chosen" : ""}`,
      element("td", "", c.own ? `${c.name} (own)` : c.name),
      element("td", className, `${signs[className]} ${c.state}`),
      element("td", "time", ago(c.since)),
      ...[c.lag ?? 0, c.counts.nodes, c.counts.ips, c.counts.identities, c.counts.services, sum(c.rejected)].map((n) => element("td", "number", n)));
    row.addEventListener("click", () => choose(c.name));
    return row;
  }));
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
  add("last error", c.lastError && `${c.lastError} (${ago(c.lastErrorAt)} ago)`);
  for (const w of c.certificateWarnings ?? []) add("certificate", w);
  for (const [reason, n] of Object.entries(c.rejected ?? {})) add("refused", `${reason}: ${n}`);
  for (const r of (c.lastRejections ?? []).slice(0, 5)) add(`${r.kind} ${r.key}`, r.reason);
  detail.replaceChildren(element("h2", "", c.name), list);
}
