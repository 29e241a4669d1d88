// SPDX-License-Identifier: Apache-2.0

// Packets as the kernel reports them, one in --flow-sample: the last ones, and the pairs of identities of the last 30 s.

import { byID, element } from "/page.js";

const span = 30000; // milliseconds that pairs are counted over
const most = 12000; // packets kept for that
const rows = 40; // packets shown
const pairs = 15; // pairs shown
const retry = 2000; // milliseconds

let recent = []; // packets within the span, oldest first
let lost = 0;
let paused = false;
let dirty = true;

/** who names a side of a flow, or an identity: by its labels, a reserved name, or the number. */
export function who(peer) {
  const labels = (peer.labels ?? []).filter((l) => !l.includes("io.cilium.k8s.") && !l.includes("io.kubernetes.pod.namespace"));
  const namespace = (peer.labels ?? []).find((l) => l.startsWith("k8s:io.kubernetes.pod.namespace="))?.split("=")[1];
  const name = peer.name || labels.map((l) => l.replace(/^k8s:/, "")).join(" ") || `identity ${peer.identity ?? peer.id}`;
  return [namespace ? `${namespace}: ${name}` : name, peer.clusterName ? `@${peer.clusterName}` : ""].filter(Boolean).join(" ");
}

const at = (peer) => (peer.port ? (peer.ip.includes(":") ? `[${peer.ip}]:${peer.port}` : `${peer.ip}:${peer.port}`) : peer.ip);
const verdictClass = (verdict) => (verdict === "dropped" || verdict.startsWith("drop") ? "failed" : "");

function side(peer) {
  return element("td", "", element("span", "mono", at(peer)), " ", element("span", "none", who(peer)));
}

function draw() {
  const now = Date.now();
  const from = recent.findIndex((f) => now - f.came < span);
  recent = from < 0 ? [] : recent.slice(Math.max(from, recent.length - most));
  const counts = new Map();
  for (const f of recent) {
    const key = `${f.source.identity} ${f.destination.identity} ${f.verdict}`;
    const pair = counts.get(key) ?? { flow: f, packets: 0 };
    pair.packets++;
    counts.set(key, pair);
  }
  const top = [...counts.values()].sort((a, b) => b.packets - a.packets).slice(0, pairs);
  byID("nopairs").hidden = top.length > 0;
  byID("rate").textContent = `${(recent.length / (span / 1000)).toFixed(1)} sampled packets/s${lost ? `, ${lost} came too fast to show` : ""}`;
  byID("pairrows").replaceChildren(...top.map(({ flow, packets }) => {
    const meter = element("meter", "");
    meter.max = top[0].packets;
    meter.value = packets;
    const bar = element("div", "bar", meter, element("span", "mono", packets));
    return element("tr", "", element("td", "", who(flow.source)), element("td", "", who(flow.destination)),
      element("td", "line " + verdictClass(flow.verdict), flow.verdict), element("td", "wide", bar));
  }));
  if (paused || !dirty) return;
  dirty = false;
  byID("flowrows").replaceChildren(...recent.slice(-rows).reverse().map((f) => element("tr", "",
    element("td", "time mono", f.time.slice(11, 23)), side(f.source), side(f.destination),
    element("td", "", [f.protocol, f.tcpFlags || f.icmp].filter(Boolean).join(" ")),
    element("td", "", `${f.device} ${f.direction === "ingress" ? "in" : "out"}`),
    element("td", "line " + verdictClass(f.verdict), f.verdict))));
}

function take(line) {
  const flow = JSON.parse(line);
  if (flow.kind === "FlowsLost") {
    lost += flow.lost;
    return;
  }
  flow.came = Date.now();
  recent.push(flow);
  if (recent.length > 2 * most) recent = recent.slice(-most);
  dirty = true;
}

async function read() {
  const response = await fetch(`/v1/flows?follow=true&last=${rows}`);
  if (!response.ok) throw new Error(response.statusText);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach(take);
  }
}

/** follow shows flows until the page is left; where the stream breaks, it is asked for again. */
export async function follow() {
  byID("pause").addEventListener("click", (event) => {
    paused = !paused;
    dirty = true;
    event.target.textContent = paused ? "go on" : "pause";
    event.target.setAttribute("aria-pressed", paused);
  });
  setInterval(draw, 500);
  for (;;) {
    try {
      await read();
    } catch {
      // Whether the agent answers is said once, where the status is read.
    }
    await new Promise((again) => setTimeout(again, retry));
    recent = []; // the stream begins with packets that were shown before
  }
}
