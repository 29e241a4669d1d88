// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

// adminOf writes the config of an administrator of an etcd with certificates, and returns its path.
func adminOf(t *testing.T, etcd *testutil.Etcd, ca *testutil.CA, user string) string {
	t.Helper()
	dir := t.TempDir()
	cert, key := ca.Issue(t, testutil.Certificate{CommonName: user})
	for name, content := range map[string][]byte{"ca.crt": ca.PEM, "client.crt": cert, "client.key": key} {
		testutil.MustWriteFile(t, filepath.Join(dir, name), content)
	}
	config := fmt.Sprintf("endpoints: [%s]\ntrusted-ca-file: %s\ncert-file: %s\nkey-file: %s\n", etcd.Endpoint(),
		filepath.Join(dir, "ca.crt"), filepath.Join(dir, "client.crt"), filepath.Join(dir, "client.key"))
	file := filepath.Join(dir, "etcd.yaml")
	testutil.MustWriteFile(t, file, []byte(config))
	return file
}

// mechanism: Q1
func TestEtcdInit(t *testing.T) {
	ca := testutil.NewCA(t, "mesh-ca")
	etcd := testutil.StartEtcd(t, testutil.WithTLS(ca))
	admin := adminOf(t, etcd, ca, "admin-east")
	init := func(config string, args ...string) (code int, stdout, stderr string) {
		t.Helper()
		return weft(t, map[string]string{"WEFT_KVSTORE_CONFIG": config, "WEFT_CLUSTER_NAME": "east"},
			append([]string{"operator", "etcd-init", "--timeout", "30s"}, args...)...)
	}
	code, planned, stderr := init(admin, "--remote", "west,north", "--dry-run")
	if code != 0 || stderr != "" || !strings.HasSuffix(planned, "\n34 changes to be made\n") {
		t.Fatalf("exit code %d, stderr %q, stdout:\n%s", code, stderr, planned)
	}
	golden(t, "operator-etcd-init.txt", planned)
	code, stdout, stderr := init(adminOf(t, etcd, ca, "remote-west"), "--remote", "west")
	if code != 1 || !strings.Contains(stderr, `we would be locked out: we are "remote-west", which has not the role root`) || stdout != "" {
		t.Errorf("done by somebody else: exit code %d, %q, %q", code, stdout, stderr)
	}
	code, done, stderr := init(admin, "--remote", "west", "--remote", "north")
	if want := strings.Replace(planned, "changes to be made", "changes made", 1); code != 0 || stderr != "" || done != want {
		t.Errorf("exit code %d, stderr %q, stdout:\n%s\nwant\n%s", code, stderr, done, want)
	}
	if code, stdout, stderr := init(admin, "--remote", "west,north"); code != 0 || stderr != "" || stdout != "0 changes made\n" {
		t.Errorf("again: exit code %d, %q, %q", code, stdout, stderr)
	}
	code, stdout, stderr = init(admin, "--remote", "north", "-o", "json")
	var did accessJSON
	if err := json.Unmarshal([]byte(stdout), &did); err != nil || code != 0 || stderr != "" {
		t.Fatalf("exit code %d, %q, %q, %v", code, stdout, stderr, err)
	}
	if did.Kind != kindAccess || did.DryRun || len(did.Changes) != 1 || did.Changes[0].User != "remote-west" || did.Changes[0].Action != "delete-user" || did.Server == "" {
		t.Errorf("%+v", did)
	}
	if code, stdout, stderr := init(adminOf(t, etcd, ca, "remote-north")); code != 1 || !strings.Contains(stderr, "permission denied") {
		t.Errorf("by a remote cluster: exit code %d, %q, %q", code, stdout, stderr)
	}
}

// From nothing to an etcd that lets a remote cluster read: first the certificates, with which etcd starts, then, with that of
// the administrator, the users.
//
// mechanism: Q1
func TestEtcdInitCertificates(t *testing.T) {
	pki := filepath.Join(t.TempDir(), "pki")
	init := func(args ...string) (code int, stdout, stderr string) {
		t.Helper()
		return weft(t, map[string]string{"WEFT_CLUSTER_NAME": "east", "WEFT_CERTIFICATES": pki, "WEFT_REMOTE": "west"},
			append([]string{"operator", "etcd-init", "--timeout", "30s", "--server-name", strings.Join(testutil.ServerHosts, ",")}, args...)...)
	}
	code, stdout, stderr := init()
	for _, name := range []string{"ca", "etcd", "admin-east", "agent-east", "local-east", "operator-east", "remote-west"} {
		if !strings.Contains(stdout, "make certificate "+filepath.Join(pki, name+".crt")+", good until 20") {
			t.Errorf("%s is not made", name)
		}
	}
	if code != 0 || stderr != "" || !strings.HasSuffix(stdout, "\n7 changes made\n") {
		t.Fatalf("exit code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
	etcd := testutil.StartEtcd(t, testutil.WithTLSFiles(pki))
	config := writeFile(t, "admin.yaml", fmt.Sprintf("endpoints: [%s]\ntrusted-ca-file: %[2]s/ca.crt\ncert-file: %[2]s/admin-east.crt\nkey-file: %[2]s/admin-east.key\n",
		etcd.Endpoint(), pki))
	if code, stdout, stderr = init("--kvstore-config", config); code != 0 || stderr != "" || !strings.Contains(stdout, "enable authentication") {
		t.Errorf("exit code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
	if code, stdout, stderr = init("--kvstore-config", config); code != 0 || stdout != "0 changes made\n" {
		t.Errorf("again: exit code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
	if err := os.Remove(filepath.Join(pki, "ca.key")); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr = init("--kvstore-config", config, "--remote", "north", "-o", "json")
	var did accessJSON
	if err := json.Unmarshal([]byte(stdout), &did); err != nil || code != 1 || len(did.Certificates)+len(did.Changes) != 0 ||
		!strings.Contains(stderr, "remote-north.crt cannot be signed, as "+pki+"/ca.key is not there") {
		t.Errorf("without the authority's key: exit code %d, %v, stderr %q, stdout:\n%s", code, err, stderr, stdout)
	}
}

// mechanism: O1
func TestOperatorGC(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	for key, value := range map[string]string{
		"cilium/state/identities/v1/id/65536":                  "k8s:app=a;",
		"cilium/state/identities/v1/id/65537":                  "k8s:app=b;",
		"cilium/state/identities/v1/value/k8s:app=b;/10.0.0.1": "65537",
		"cilium/state/identities/v1/id/131072":                 "k8s:app=a;",
		"cilium/state/nodes/v1/east/n1":                        `{"Name":"n1","Cluster":"east","ClusterID":1,"IPAddresses":[{"Type":"InternalIP","IP":"172.18.1.1"}]}`,
		"cilium/state/ip/v1/default/10.1.0.1":                  `{"IP":"10.1.0.1","Mask":null,"HostIP":"172.18.1.9","ID":65537,"Key":0,"Metadata":"cilium-global:default:n9:1"}`,
	} {
		etcd.Put(t, key, value)
	}
	file := filepath.Join(t.TempDir(), "etcd.yaml")
	etcd.WriteConfig(t, file)
	env := map[string]string{"WEFT_KVSTORE_CONFIG": file, "WEFT_CLUSTER_NAME": "east", "WEFT_CLUSTER_ID": "1"}
	for golding, args := range map[string]string{"operator-gc.txt": "", "operator-gc.json": "-o json"} {
		code, stdout, stderr := weft(t, env, append([]string{"operator", "gc", "--dry-run"}, strings.Fields(args)...)...)
		if code != 0 || stderr != "" {
			t.Errorf("exit code %d, stderr %q", code, stderr)
		}
		golden(t, golding, stdout)
	}
	if _, ok := etcd.Get(t, "cilium/state/identities/v1/id/65536"); !ok {
		t.Error("a look deletes")
	}
}
