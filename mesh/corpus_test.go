// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/service"
)

// goodValues are one good object of each kind of west.
var goodValues = map[string]struct{ key, value string }{
	"node": {"west-n1", `{"Name":"west-n1","Cluster":"west","ClusterID":2,"IPAddresses":[{"Type":"InternalIP","IP":"172.18.2.1"}],` +
		`"IPv4AllocCIDR":{"IP":"10.2.1.0","Mask":"////AA=="},"EncryptionKey":3}`},
	"service": {"shop/web", `{"cluster":"west","namespace":"shop","name":"web","clusterID":2,"shared":true,` +
		`"backends":{"10.2.1.10":{"http":{"Protocol":"TCP","Port":80}}}}`},
	"ip":       {"10.2.1.10", `{"IP":"10.2.1.10","Mask":null,"HostIP":"172.18.2.1","ID":131329,"Key":0,"Metadata":""}`},
	"identity": {"131329", "k8s:app=web;k8s:io.cilium.k8s.policy.cluster=west;"},
}

// badValue is a value, under the good object's key unless it has its own, that must be refused.
type badValue struct{ kind, name, key, value string }

// badValues are the corpus: what is bad in every kind of JSON, and in each kind's fields.
func badValues() []badValue {
	var all []badValue
	for kind, good := range goodValues {
		all = append(all, badValue{kind, "10 MiB of spaces", "", good.value + strings.Repeat(" ", 10<<20)})
		all = append(all, badValue{kind, "10 MiB of text", "", strings.Repeat("x", 10<<20)})
		if kind == "identity" {
			continue
		}
		for name, value := range map[string]string{
			"empty": "", "truncated": good.value[:len(good.value)/2], "null": "null", "array": "[]", "string": `"x"`, "number": "1",
			"depth": strings.Repeat(`{"a":`, 10_001) + "1" + strings.Repeat("}", 10_001), "depth of arrays": strings.Repeat("[", 10_001),
			"NUL": "\x00", "NUL in front": "\x00" + good.value, "two values": good.value + good.value, "invalid UTF-8 outside of text": "\xff" + good.value,
		} {
			all = append(all, badValue{kind, name, "", value})
		}
	}
	replace := func(kind, name, old, new string) {
		value := strings.Replace(goodValues[kind].value, old, new, 1)
		if value == goodValues[kind].value {
			panic(kind + " " + name)
		}
		all = append(all, badValue{kind, name, "", value})
	}
	for _, number := range []string{"-1", "1e99", "4294967296", "99999999999999999999999999", "2.5", `"2"`, "true", "[2]", "{}"} {
		replace("node", "ClusterID "+number, `"ClusterID":2`, `"ClusterID":`+number)
		replace("service", "clusterID "+number, `"clusterID":2`, `"clusterID":`+number)
		replace("ip", "ID "+number, `"ID":131329`, `"ID":`+number)
		replace("node", "EncryptionKey "+number, `"EncryptionKey":3`, `"EncryptionKey":2`+number)
		replace("ip", "Key "+number, `"Key":0`, `"Key":2`+number)
		replace("service", "port "+number, `"Port":80`, `"Port":2`+number+"000")
	}
	for _, addr := range []string{"fe80::1%eth0", "172.18.2.1%1", "172.18.2", "0x7f.1", "172.18.2.1/24", "172.18.2.256", "1", " 172.18.2.1", "a\\u0000b", "\\n"} {
		replace("node", "address "+addr, `"IP":"172.18.2.1"`, `"IP":"`+addr+`"`)
		replace("ip", "host "+addr, `"HostIP":"172.18.2.1"`, `"HostIP":"`+addr+`"`)
		replace("ip", "address "+addr, `"IP":"10.2.1.10"`, `"IP":"`+addr+`"`)
		replace("service", "backend "+addr, `"10.2.1.10":`, `"`+addr+`":`)
	}
	// Masks of the wrong length (33 and 129 bits would need 5 and 17 bytes), with holes, and none at all.
	for _, mask := range []string{`"/////4A="`, `"AAAA"`, `"//8A/w=="`, `"//////////////////////8="`, `"!"`, `33`, `129`, `-1`, `""`} {
		replace("node", "mask "+mask, `"////AA=="`, mask)
		replace("ip", "mask "+mask, `"Mask":null`, `"Mask":`+mask)
	}
	replace("node", "no name", `"Name":"west-n1"`, `"Name":""`)
	replace("node", "another name", `"Name":"west-n1"`, `"Name":"west-n2"`)
	replace("node", "another cluster", `"Cluster":"west"`, `"Cluster":"east"`)
	replace("node", "another cluster's id", `"ClusterID":2`, `"ClusterID":1`)
	replace("node", "duplicate key, the last counts", `"ClusterID":2`, `"ClusterID":2,"ClusterID":1`)
	replace("service", "no name", `"name":"web"`, `"name":""`)
	replace("service", "no namespace", `"namespace":"shop"`, `"namespace":""`)
	replace("service", "another cluster", `"cluster":"west"`, `"cluster":"east"`)
	replace("service", "duplicate key, the last counts", `"clusterID":2`, `"clusterID":2,"clusterID":1`)
	replace("ip", "another address", `"IP":"10.2.1.10"`, `"IP":"10.2.1.11"`)
	replace("ip", "duplicate key, the last counts", `"IP":"10.2.1.10"`, `"IP":"10.2.1.10","IP":"10.2.1.11"`)
	replace("ip", "pod with a newline", `"Metadata":""`, `"K8sPodName":"a\nb"`)
	replace("ip", "pod with invalid UTF-8", `"Metadata":""`, "\"K8sPodName\":\"a\xffb\"")
	replace("ip", "endless namespace", `"Metadata":""`, `"K8sNamespace":"`+strings.Repeat("n", 254)+`"`)
	replace("identity", "another cluster", "cluster=west", "cluster=east")
	replace("identity", "no cluster", "k8s:io.cilium.k8s.policy.cluster", "k8s:x")
	for _, name := range []string{"..", "../east-n1", "a/b", "a\nb", "a\x00b", "a\x1b[2J", " a", strings.Repeat("a", 254)} {
		quoted := strings.NewReplacer("\n", `\n`, "\x00", `\u0000`, "\x1b", `\u001b`).Replace(name)
		all = append(all,
			badValue{"node", "name " + name, name, strings.Replace(goodValues["node"].value, `"Name":"west-n1"`, `"Name":"`+quoted+`"`, 1)},
			badValue{"service", "name " + name, "shop/" + name, strings.Replace(goodValues["service"].value, `"name":"web"`, `"name":"`+quoted+`"`, 1)},
			badValue{"ip", "key " + name, name, goodValues["ip"].value},
			badValue{"identity", "key " + name, name, goodValues["identity"].value},
		)
	}
	for _, key := range []string{"", "-1", "0131329", "+131329", "131329 ", "1e5", "0x20101", "4294967296", "65793", "255", "0"} {
		all = append(all, badValue{"identity", "key " + key, key, goodValues["identity"].value})
	}
	return all
}

// Every bad value is refused, once, without a panic; what was good before it stays, and so do its neighbours. None takes
// more than a few times its own size.
//
// lesson: C1 C2 C4 C8
func TestCorpus(t *testing.T) {
	for _, bad := range badValues() {
		name := fmt.Sprintf("%s/%.40q", bad.kind, bad.name)
		cfg := testConfig(t)
		m, err := newMesh(cfg, testTiming)
		if err != nil {
			t.Fatal(err)
		}
		r := newRemote(m, "west")
		fs := r.newFeeds(2, false)
		deliver := func(f *feed, key, value string) {
			f.apply([]kvstore.Event{{Kind: kvstore.Modified, Key: []byte(key), Value: []byte(value), Revision: 1}})
		}
		var target *feed
		for _, f := range fs.inDrainOrder() {
			deliver(f, goodValues[f.kind].key, goodValues[f.kind].value)
			if f.kind == bad.kind {
				target = f
			}
		}
		good := fmt.Sprint(tableText(cfg.IPs), servicesText(cfg.Services), cfg.Identities.Len())
		if counts, last := r.rejects.report(); len(counts) != 0 {
			t.Fatalf("good values refused: %v", last)
		}
		key := bad.key
		if key == "" && !strings.HasPrefix(bad.name, "key ") {
			key = goodValues[bad.kind].key
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		deliver(target, key, bad.value)
		runtime.ReadMemStats(&after)
		counts, last := r.rejects.report()
		var total uint64
		for _, n := range counts {
			total += n
		}
		if total != 1 || len(last) != 1 || last[0].Kind != bad.kind || !slices.ContainsFunc(slices.Collect(maps.Keys(counts)), func(s string) bool {
			return strings.HasPrefix(s, bad.kind+"/")
		}) {
			t.Errorf("%s: refusals %v %+v, want one of the kind", name, counts, last)
		}
		if got := fmt.Sprint(tableText(cfg.IPs), servicesText(cfg.Services), cfg.Identities.Len()); got != good {
			t.Errorf("%s: tables\n%s\nwant\n%s", name, got, good)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > 2*uint64(len(bad.value))+2<<20 {
			t.Errorf("%s: %d bytes allocated for a value of %d", name, took, len(bad.value))
		}
		for _, f := range fs.inDrainOrder() {
			f.remove([]byte(goodValues[f.kind].key))
			f.remove([]byte(key))
			f.decode.flush(time.Time{})
		}
		if left := len(tableText(cfg.IPs)) + cfg.Services.Len() + cfg.Identities.Len(); left != 0 {
			t.Errorf("%s: %d objects left after all are deleted", name, left)
		}
	}
}

// servicesText is all that the table holds of other clusters' services.
func servicesText(table *service.Table) string {
	var text strings.Builder
	for _, o := range table.Snapshot() {
		fmt.Fprintf(&text, "%+v\n", *o)
	}
	return text.String()
}
