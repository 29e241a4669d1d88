// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/internal/testutil"
)

// Who asks for a service without backends, or for one whose only backend is itself, is refused at once: behind a veth and
// behind a bridge, over IPv4 and IPv6, TCP and UDP, and in the midst of a connection that is not known.
func TestTranslationRefuses(t *testing.T) {
	for name, withoutTCX := range podModes() {
		t.Run(name, func(t *testing.T) {
			h := newRouterHost(t, withoutTCX)
			for _, protocol := range []string{"tcp", "udp"} {
				h.services.put(protocol+" 10.96.0.10:80", nil)
				h.services.put(protocol+" [fd00:96::10]:80", nil)
				h.services.put(protocol+" 10.96.0.11:80", []string{podA})
			}
			h.services.put("tcp 10.96.0.12:80", []string{far4})
			h.cfg.ServicesListed = func() bool { return true }
			a := h.startRouter()
			h.services.wantKernel("tcp 10.96.0.12:80", far4)
			h.services.wantKernel("udp 10.96.0.11:80", podA)
			for from, targets := range map[*testHost][]string{
				h.a: {"10.96.0.10:80", "[fd00:96::10]:80", "10.96.0.11:80"}, // the last of which leads to itself
				h.b: {"10.96.0.10:80"},
			} {
				for _, to := range targets {
					for _, network := range []string{"tcp", "udp"} {
						if answered, err := from.askFrom(network, to); !errors.Is(err, unix.ECONNREFUSED) {
							t.Errorf("%s to %s: answered by %q, %v, want it refused", network, to, answered, err)
						}
					}
				}
			}
			open, err := h.a.dialIn("tcp", "10.96.0.12:80")
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()
			if _, err := ask(open); err != nil {
				t.Fatal(err)
			}
			h.services.put("tcp 10.96.0.12:80", nil)
			h.services.wantKernel("tcp 10.96.0.12:80", []string{}...)
			if err := exchange(open, 4096); err != nil { // it has its backend
				t.Errorf("a connection whose backend is no longer one: %v", err)
			}
			h.forgetFlows()
			if err := exchange(open, 16); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
				t.Errorf("a connection that is not known: %v, want it reset", err)
			}
			s := a.Status().Services.Translation
			if s.Answered < 9 || s.Answered > s.Refused+s.Hairpin || s.Hairpin < 2 || s.Failed != 0 {
				t.Errorf("status %+v, want at least 9 answered, two of them to the client itself", s)
			}
		})
	}
}

// The program that identifies comes before the one that translates, whichever of their links was made last.
func TestLinkOrder(t *testing.T) {
	h := newRouterHost(t, false)
	h.services.put("tcp 10.96.0.10:80", []string{far4})
	a := h.startRouter()
	h.services.wantKernel("tcp 10.96.0.10:80", far4)
	want := map[string][]string{"ingress": {"weft_from_pod", "weft_to_backend"}, "egress": {"weft_to_pod", "weft_to_client"}}
	inOrder := func() error {
		if diff := cmp.Diff(want, h.order("lxca")); diff != "" {
			return fmt.Errorf("programs of lxca (-want +got):\n%s", diff)
		}
		return nil
	}
	if err := inOrder(); err != nil {
		t.Fatal(err)
	}
	dir := h.cfg.BPFFS + "/weft/links/lxca-"
	detach := func(name string) {
		t.Helper()
		l, err := link.LoadPinnedLink(dir+name, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Detach(); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range bpf.PodPrograms {
		detach(p.Name)
	}
	a.verify(true)
	testutil.Eventually(t, patience, inOrder)
	h.a.wantAnswer("tcp", "10.96.0.10:80", far4)

	// As another version may have left them.
	a.stop()
	for i, p := range bpf.TranslationPrograms {
		identifies := bpf.PodPrograms[i]
		detach(identifies.Name)
		program, err := ebpf.LoadPinnedProgram(h.cfg.BPFFS+"/weft/programs/"+identifies.Name, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer program.Close()
		h.ns.Do(t, func() {
			index, err := interfaceIndex("lxca")
			if err != nil {
				t.Fatal(err)
			}
			l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: program, Attach: p.Attach})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			if err := errors.Join(os.Remove(dir+identifies.Name), l.Pin(dir+identifies.Name)); err != nil {
				t.Fatal(err)
			}
		})
	}
	if err := inOrder(); err == nil {
		t.Fatal("the links are in order, though they were made in another")
	}
	a = h.startRouter()
	testutil.Eventually(t, patience, inOrder)
	h.a.wantAnswer("tcp", "10.96.0.10:80", far4)
	if got := a.verify(false); len(got) != 0 {
		t.Errorf("differences where there are none: %v", got)
	}
}

// order is which programs run at the hooks of a device, one after the other.
func (h *routerHost) order(device string) map[string][]string {
	h.t.Helper()
	all := map[string][]string{}
	h.ns.Do(h.t, func() {
		index, err := interfaceIndex(device)
		if err != nil {
			h.t.Fatal(err)
		}
		for hook, attach := range map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress} {
			result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: attach})
			if err != nil {
				h.t.Fatal(err)
			}
			for _, p := range result.Programs {
				for _, name := range bpf.DevicePrograms() {
					if id, err := programAt(h.cfg.BPFFS + "/weft/programs/" + name.Name); err == nil && ebpf.ProgramID(id) == p.ID {
						all[hook] = append(all[hook], name.Name)
					}
				}
			}
		}
	})
	return all
}
