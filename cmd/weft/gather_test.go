// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
)

// readBundle returns the files of a bundle, in order, by name.
func readBundle(t *testing.T, path string) (names []string, files map[string]string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	compressed, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files = make(map[string]string)
	for archive := tar.NewReader(compressed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return names, files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, header.Name)
		files[header.Name] = string(content)
	}
}

// A bundle has what the list says, and none of the secrets that are on the machine: not those of the configs, and not even
// those that an error message of the agent quotes.
func TestGather(t *testing.T) {
	const password, own, key = `hunter"2"-of-west`, "the-own-password", "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7"
	const operators = "what-the-operator-says"
	dir := t.TempDir()
	mesh, kvstoreConfig := filepath.Join(dir, "clustermesh"), filepath.Join(dir, "kvstore.yaml")
	if err := os.Mkdir(mesh, 0o755); err != nil {
		t.Fatal(err)
	}
	testutil.MustWriteFile(t, filepath.Join(mesh, "west"), []byte("endpoints: [https://west:2379]\nusername: u\npassword: '"+password+"'\n"))
	testutil.MustWriteFile(t, filepath.Join(mesh, "west.key"), []byte("-----BEGIN PRIVATE KEY-----\n"+key+"\n-----END PRIVATE KEY-----\n"))
	testutil.MustWriteFile(t, kvstoreConfig, []byte("endpoints: [https://east:2379]\nusername: u\npassword: "+own+"\n"))

	agent := lab(true)
	config, status := agent.Config(), labStatus(false)
	config.Items = append(config.Items, api.ConfigOption{Name: "clustermesh-config", Value: mesh}, api.ConfigOption{Name: "kvstore-config", Value: kvstoreConfig})
	status.Clusters[1].LastError = "login as u with " + password + " at https://u:" + own + "2@west:2379 refused: -----BEGIN PRIVATE KEY-----\n" + key + "\n-----END PRIVATE KEY-----"
	agent.Config, agent.Status = func() api.Config { return config }, func() api.Status { return status }
	operatorConfig, operatorStatus := filepath.Join(dir, "operator-kvstore.yaml"), labOperator(false)
	testutil.MustWriteFile(t, operatorConfig, []byte("endpoints: [https://east:2379]\nusername: u\npassword: "+operators+"\n"))
	operatorStatus.KVStore.LastError = "login with " + operators + " refused"
	env := map[string]string{
		"WEFT_API_SOCKET": serveAgent(t, agent), "WEFT_BPFFS": filepath.Join(dir, "none"),
		"WEFT_OPERATOR_SOCKET": serveOperator(t, operatorStatus), "WEFT_KVSTORE_CONFIG": operatorConfig,
	}
	if _, stdout, _ := weft(t, env, "operator", "status", "-o", "json"); !strings.Contains(stdout, operators) {
		t.Fatal("the operator does not tell what the bundle must not have")
	}

	if _, stdout, _ := weft(t, env, "status", "-o", "json"); !strings.Contains(stdout, key) {
		t.Fatal("the agent does not tell what the bundle must not have")
	}
	path := filepath.Join(dir, "bundle.tar.gz")
	code, stdout, stderr := weft(t, env, "gather", "--file", path)
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d\n%s%s", code, stdout, stderr)
	}
	names, files := readBundle(t, path)
	want := []string{"weft/manifest.json"}
	for _, g := range gathered {
		want = append(want, "weft/"+g.file)
	}
	want = append(want, "weft/goroutines.txt", "weft/heap.pb.gz", "weft/os-release", "weft/kernel")
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
	quoted, err := json.Marshal(password)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		for _, secret := range []string{password, strings.Trim(string(quoted), `"`), "hunter", own, operators, key, key[:20]} {
			if strings.Contains(content, secret) {
				t.Errorf("%s has the secret %s", name, secret)
			}
		}
	}
	for name, text := range map[string]string{
		"weft/status.json": "login as u with <redacted> at https://<redacted>@west:2379 refused", "weft/config.json": `"cluster-name"`,
		"weft/goroutines.txt": "goroutine ", "weft/kernel": "Linux version", "weft/nodes.json": "west-n1", "weft/operator-status.json": "login with <redacted> refused", "weft/manifest.json": "weft bpf counters list -o json",
	} {
		// In JSON, what could drive a browser is escaped.
		if content := strings.NewReplacer(`\u003c`, "<", `\u003e`, ">").Replace(files[name]); !strings.Contains(content, text) {
			t.Errorf("%s lacks %q:\n%.500s", name, text, content)
		}
	}
	if strings.Contains(strings.Join(names, " "), "ips.json") {
		t.Error("addresses were not asked for")
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if code, _, stderr := weft(t, env, "gather", "--file", path); code != exitNot || !strings.Contains(stderr, "exists") {
		t.Errorf("over a file that is there: exit code %d, %s", code, stderr)
	}
}

// Without an agent there is a bundle of what there is, which says what is missing; and addresses are in one on request.
func TestGatherWithoutAgent(t *testing.T) {
	dir := t.TempDir()
	env := map[string]string{"WEFT_API_SOCKET": filepath.Join(dir, "none"), "WEFT_BPFFS": dir}
	path := filepath.Join(dir, "bundle.tar.gz")
	code, stdout, stderr := weft(t, env, "gather", "--addresses", "--file", path, "-o", "json")
	if code != 0 || stderr != "" || !strings.Contains(stdout, `"Bundle"`) {
		t.Fatalf("exit code %d\n%s%s", code, stdout, stderr)
	}
	_, files := readBundle(t, path)
	var manifest bundle
	if err := json.Unmarshal([]byte(files["weft/manifest.json"]), &manifest); err != nil {
		t.Fatal(err)
	}
	found := make(map[string]bundleEntry)
	for _, item := range manifest.Items {
		found[item.File] = item
	}
	if e := found["status.json"]; e.Exit != exitUnreachable || !strings.Contains(e.Error, "agent unreachable") {
		t.Errorf("status: %+v", e)
	}
	if e := found["version.json"]; e.Exit != exitOK || e.Bytes == 0 {
		t.Errorf("version: %+v", e)
	}
	if _, ok := found["ips.json"]; !ok {
		t.Errorf("no addresses in %v", found)
	}
}
