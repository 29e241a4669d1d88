// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// hook is where a program runs: a direction of a device, and its place there.
type hook struct {
	IfIndex int
	Attach  ebpf.AttachType
	Behind  bool // the other program of ours
}

// behind is the hook of the program of ours that runs behind this one's; of that one, none.
func (h hook) behind() hook {
	if h.Behind {
		return hook{}
	}
	h.Behind = true
	return h
}

// attacher makes devices run the programs. What is in the kernel is its state, so that an agent that starts and one that
// has run for long do the same. It is for one goroutine, in the network namespace of its thread.
type attacher interface {
	// sync attaches all programs to the wanted devices, keeps what it finds on those of sticky, and removes all else that
	// is ours. What is right is not touched; what runs another program is updated in one step, so that no packet passes
	// unseen. What goes wrong with one device stands in its status; the error is about more than that.
	sync(wanted, sticky []device) ([]DeviceStatus, error)
	// compare tells what sync would change.
	compare(wanted, sticky []device) ([]Difference, error)
	// drifted is how many of the programs that a sync had attached, and that are still wanted, the next one found otherwise.
	// It counts from the last call.
	drifted() int
	// intact reports whether what the last sync left is still there, as far as the kernel does not tell of it unasked.
	intact() bool
	// Close lets go of what is attached and leaves it attached.
	Close()
}

// hasTCX reports whether the kernel has tcx hooks, as Linux has since 6.6.
func hasTCX() bool {
	// A kernel that knows the hooks looks for the device first.
	const noDevice = math.MaxInt32
	_, err := link.QueryPrograms(link.QueryOptions{Target: noDevice, Attach: ebpf.AttachTCXIngress})
	return errors.Is(err, unix.ENODEV)
}

// attachment is a program that a device is to have.
type attachment struct {
	hook
	program
	device string
	path   string // of the pin of its link, where it has one
	status *ProgramStatus
}

// plan says what the wanted devices are to have, and with which pins.
func plan(dir *pinDir, programs []program, wanted []device) ([]DeviceStatus, []attachment) {
	all := make([]DeviceStatus, len(wanted))
	var jobs []attachment
	owners := map[string]string{} // of pin names, by their common part
	for i, dev := range wanted {
		status := &all[i]
		*status = DeviceStatus{Name: dev.Name, IfIndex: dev.Index, Role: dev.Role.String()}
		stem := linkPinName(dev.Name, "")
		owner, taken := owners[stem]
		switch {
		case dev.Index == 0:
			status.Error = "there is no such device; it gets its programs when it appears"
			continue
		case !dev.Ethernet:
			status.Error = "its frames have no Ethernet header, which the programs expect"
			continue
		case taken && owner != dev.Name:
			status.Error = fmt.Sprintf("its pins would have the names of those of device %s: rename one of the two", owner)
			continue
		}
		owners[stem] = dev.Name
		of := slices.DeleteFunc(slices.Clone(programs), func(p program) bool { return !p.isFor(dev) })
		status.Programs = make([]ProgramStatus, len(of))
		for j, p := range of {
			status.Programs[j] = ProgramStatus{Name: p.Name, Direction: p.direction().String()}
			jobs = append(jobs, attachment{
				hook:    hook{dev.Index, p.Attach, p.Behind},
				program: p,
				device:  dev.Name,
				path:    dir.file(pinLinksDir, linkPinName(dev.Name, p.Name)),
				status:  &status.Programs[j],
			})
		}
	}
	return all, jobs
}

// withSticky adds to the wanted devices those of sticky that have a program of their role: has tells which, by its name.
func withSticky(wanted, sticky []device, programs []program, has func(hook) string) []device {
	wanted = slices.Clone(wanted)
	for _, dev := range sticky {
		one := func(p program) bool { return p.isFor(dev) && has(hook{dev.Index, p.Attach, p.Behind}) == p.Name }
		known := func(w device) bool {
			return w.Index == dev.Index && (w.Role == roleService) == (dev.Role == roleService)
		}
		if !slices.ContainsFunc(wanted, known) && slices.ContainsFunc(programs, one) {
			wanted = append(wanted, dev)
		}
	}
	return wanted
}

// unrecoverable picks from the errors of devices those that are about more than the device.
func unrecoverable(err error) error {
	if errors.Is(err, ErrKernel) || errors.Is(err, ErrPrivileges) {
		return err
	}
	return nil
}

// removePin removes a pin; an absent one is fine.
func removePin(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return explain("remove pin "+path, err)
	}
	return nil
}
