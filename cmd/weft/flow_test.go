// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Each filter lets through what it asks for, of either side; all that are given count.
func TestFlowFilters(t *testing.T) {
	env := map[string]string{"WEFT_API_SOCKET": serveAgent(t, lab(true))}
	const web, ping, other = "10.2.1.10", "fd00:10:1:1::10", "?"
	for args, want := range map[string][]string{
		"":                                    {web, ping, other},
		"--cluster west":                      {web},
		"--cluster east":                      {web, ping},
		"--identity 131329":                   {web},
		"--identity 65793,world-ipv6":         {web, ping},
		"--identity world-ipv6":               {ping},
		"--label app=web":                     {web},
		"--label k8s:app=web":                 {web},
		"--label app":                         {web},
		"-l app=web,app=db":                   nil,
		"--ip 10.2.1.10":                      {web},
		"--ip 10.0.0.0/8":                     {web},
		"--ip 2001:db8::/32,10.1.1.10":        {web, ping},
		"--port 80":                           {web},
		"--port 34567,81":                     {web},
		"--port 81":                           nil,
		"--verdict world":                     {ping},
		"--verdict world,not-ip":              {ping, other},
		"--device eth0":                       {web, ping, other},
		"--device eth1":                       nil,
		"--cluster west --verdict identified": {web},
		"--cluster west --verdict world":      nil,
		"--cluster east --ip 2001:db8::1":     {ping},
	} {
		code, stdout, stderr := weft(t, env, append([]string{"flows"}, strings.Fields(args)...)...)
		if code != 0 || stderr != "" {
			t.Errorf("flows %s: exit code %d, %s", args, code, stderr)
		}
		var got []string
		for line := range strings.Lines(stdout) {
			for _, mark := range []string{web, ping, other} {
				if strings.Contains(line, mark) {
					got = append(got, mark)
					break
				}
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("flows %s (-want +got)\n%s", args, diff)
		}
	}
	code, stdout, stderr := weft(t, env, "flows", "--cluster", "nowhere")
	if want := "weft: cluster nowhere is not followed: not found: there are west, east\n"; code != exitNot || stdout != "" || stderr != want {
		t.Errorf("flows of a cluster that nobody knows: exit code %d, %q, %q, want %q", code, stdout, stderr, want)
	}
}

// block is a block of pcapng, read back.
type block struct {
	kind uint32
	body []byte
}

func readBlocks(t *testing.T, b []byte) (blocks []block) {
	t.Helper()
	for len(b) > 0 {
		if len(b) < 12 || len(b)%4 != 0 {
			t.Fatalf("%d bytes are no block", len(b))
		}
		length := int(binary.LittleEndian.Uint32(b[4:]))
		if length > len(b) || length%4 != 0 || int(binary.LittleEndian.Uint32(b[length-4:])) != length {
			t.Fatalf("a block of %d bytes, of %d that are there, or another at its end", length, len(b))
		}
		blocks = append(blocks, block{binary.LittleEndian.Uint32(b), b[8 : length-4]})
		b = b[length:]
	}
	return blocks
}

// The file is what the format says, byte for byte: a section, a device, a packet for each flow that is one of IP.
func TestFlowsPcap(t *testing.T) {
	env := map[string]string{"WEFT_API_SOCKET": serveAgent(t, lab(true))}
	file := filepath.Join(t.TempDir(), "flows.pcapng")
	if code, stdout, stderr := weft(t, env, "flows", "--pcap", file); code != 0 || stdout+stderr != "" {
		t.Fatalf("exit code %d, %q, %q", code, stdout, stderr)
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if _, stdout, _ := weft(t, env, "flows", "--pcap", "-"); stdout != string(content) {
		t.Error("standard output gets something else than a file")
	}
	blocks := readBlocks(t, content)
	var kinds []uint32
	for _, b := range blocks {
		kinds = append(kinds, b.kind)
	}
	if diff := cmp.Diff([]uint32{0x0a0d0d0a, 1, 6, 6}, kinds); diff != "" {
		t.Fatalf("kinds of blocks (-want +got)\n%s", diff)
	}
	if got := fmt.Sprintf("%x", blocks[1].body); got != "65000000"+"00000000"+"02000400"+"65746830"+"09000100"+"09000000"+"00000000" {
		t.Errorf("device: %s", got)
	}
	packets := []struct {
		headers string
		length  uint32
		comment string
	}{
		{"4500003c000000004006" + "64a6" + "0a02010a" + "0a01010a" + // its checksum worked out by hand
			"87070050" + "00000000" + "00000000" + "50020000" + "00000000", 60, "10.2.1.10:34567 (131329 shop/app=web @west)"},
		{"60000000" + "00403a40" + "fd000010000100010000000000000010" + "20010db8000000000000000000000001" + "8000000000000000", 104, "128/0"},
	}
	for i, want := range packets {
		b := blocks[2+i].body
		ticks := uint64(binary.LittleEndian.Uint32(b[4:]))<<32 | uint64(binary.LittleEndian.Uint32(b[8:]))
		if at := time.Unix(0, int64(ticks)); binary.LittleEndian.Uint32(b) != 0 || !at.Equal(testNow) {
			t.Errorf("packet %d: device %d, time %s", i, binary.LittleEndian.Uint32(b), at)
		}
		kept, length := binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint32(b[16:])
		if got := fmt.Sprintf("%x", b[20:20+kept]); got != want.headers || length != want.length {
			t.Errorf("packet %d: %s of %d bytes\nwant     %s of %d", i, got, length, want.headers, want.length)
		}
		if !bytes.Contains(b[20+kept:], []byte(want.comment)) {
			t.Errorf("packet %d: comment %q lacks %q", i, b[20+kept:], want.comment)
		}
	}
	if code, _, stderr := weft(t, env, "flows", "--pcap", filepath.Join(file, "x")); code != exitNot || !strings.Contains(stderr, "not a directory") {
		t.Errorf("a file that cannot be made: exit code %d, %s", code, stderr)
	}
}

// What others read with opens the file: tcpdump shows the packets, and tshark their comments, with the identities.
func TestFlowsPcapOpens(t *testing.T) {
	env := map[string]string{"WEFT_API_SOCKET": serveAgent(t, lab(true))}
	file := filepath.Join(t.TempDir(), "flows.pcapng")
	if code, stdout, stderr := weft(t, env, "flows", "--pcap", file); code != 0 {
		t.Fatalf("exit code %d, %q, %q", code, stdout, stderr)
	}
	for _, reader := range []struct {
		args  string
		wants []string
	}{
		{"tcpdump -nn -r " + file, []string{
			"IP 10.2.1.10.34567 > 10.1.1.10.80: Flags [S]", "IP6 fd00:10:1:1::10 > 2001:db8::1: ICMP6, echo request",
		}},
		{"tshark -n -r " + file + " -T fields -e ip.src -e tcp.dstport -e frame.interface_name -e frame.comment", []string{
			"10.2.1.10 80 eth0 ", "ingress identified TCP 10.2.1.10:34567 (131329 shop/app=web @west) -> 10.1.1.10:80 (65793 ",
			"egress  world ICMPv6 fd00:10:1:1::10 (65793 @east) -> 2001:db8::1 (10 world-ipv6) 128/0 118 bytes",
		}},
	} {
		words := strings.Fields(reader.args)
		var stdout, stderr bytes.Buffer
		cmd := exec.Command(words[0], words[1:]...)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Run(); err != nil {
			t.Errorf("%s: %v\n%s", reader.args, err, stderr.String())
			continue
		}
		if err := contains(stdout.String(), reader.wants...); err != nil {
			t.Errorf("%s: %v", words[0], err)
		}
	}
}
