// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// hook is where a link runs its program.
type hook struct {
	IfIndex int
	Attach  ebpf.AttachType
}

// pinnedLink is a link of ours that was found pinned and runs at its hook in this network namespace.
type pinnedLink struct {
	link.Link
	ID      link.ID
	Program ebpf.ProgramID
	path    string
}

// attacher makes the pinned links equal the wanted devices. It keeps nothing between calls: what is pinned is the state,
// so that an agent that starts and one that has run for long do the same. It works in the network namespace of the
// calling thread.
type attacher struct {
	dir      *pinDir
	programs []program
}

// links returns the pinned links that run, by their hook, and the paths of pins that hold no such link: the device is
// gone or in another network namespace, the link was detached, or the pin is of a version with other programs. The links
// are to be closed.
func (a *attacher) links() (live map[hook]pinnedLink, dead []string, err error) {
	files, err := os.ReadDir(a.dir.file(pinLinksDir))
	if err != nil {
		return nil, nil, explain("list pinned links", err)
	}
	live = map[hook]pinnedLink{}
	for _, file := range files {
		path := a.dir.file(pinLinksDir, file.Name())
		l, at, err := a.inspect(path)
		switch {
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE):
			closeLinks(live)
			return nil, nil, explain("open link "+path, err)
		case err != nil:
			dead = append(dead, path)
			continue
		}
		if _, taken := live[at]; taken {
			_ = l.Close()
			dead = append(dead, path)
			continue
		}
		live[at] = l
	}
	return live, dead, nil
}

// errDeadLink indicates a pin whose link runs no program here.
var errDeadLink = errors.New("link runs no program here")

// inspect opens one pin. That the link names an index does not mean much, since the device may have moved to another
// network namespace, where ours has another device of that index: the hook itself is asked whether it has the link.
func (a *attacher) inspect(path string) (_ pinnedLink, _ hook, err error) {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return pinnedLink{}, hook{}, err
	}
	defer func() {
		if err != nil {
			_ = l.Close()
		}
	}()
	info, err := l.Info()
	if err != nil {
		return pinnedLink{}, hook{}, err
	}
	tcx := info.TCX()
	if tcx == nil || tcx.Ifindex == 0 {
		return pinnedLink{}, hook{}, errDeadLink
	}
	at := hook{IfIndex: int(tcx.Ifindex), Attach: ebpf.AttachType(tcx.AttachType)}
	if !slices.ContainsFunc(a.programs, func(p program) bool { return p.Attach == at.Attach }) {
		return pinnedLink{}, hook{}, errDeadLink
	}
	attached, err := link.QueryPrograms(link.QueryOptions{Target: at.IfIndex, Attach: at.Attach})
	if err != nil {
		return pinnedLink{}, hook{}, err
	}
	for _, p := range attached.Programs {
		if id, ok := p.LinkID(); ok && id == info.ID {
			return pinnedLink{Link: l, ID: info.ID, Program: info.Program, path: path}, at, nil
		}
	}
	return pinnedLink{}, hook{}, errDeadLink
}

func closeLinks(links map[hook]pinnedLink) {
	for _, l := range links {
		_ = l.Close()
	}
}

// attachment is a program that a device is to have.
type attachment struct {
	hook
	program
	path   string
	status *ProgramStatus
}

// sync attaches all programs to the wanted devices, keeps what it finds on those of sticky, and removes every other link
// of ours. Links that are right are not touched; one that runs another program is updated in one step, so that no packet
// passes unseen. What goes wrong with one device stands in its status; the error is about more than that.
func (a *attacher) sync(wanted, sticky []device) ([]DeviceStatus, error) {
	live, dead, err := a.links()
	if err != nil {
		return nil, err
	}
	defer closeLinks(live)
	var errs []error
	for _, path := range dead {
		errs = append(errs, removePin(path))
	}
	for _, dev := range sticky {
		has := func(p program) bool { return live[hook{dev.Index, p.Attach}].Link != nil }
		if !slices.Contains(wanted, dev) && slices.ContainsFunc(a.programs, has) {
			wanted = append(wanted, dev)
		}
	}
	all, jobs := a.plan(wanted)
	// Links whose device was renamed are moved aside before any gets its place, since devices may have swapped names.
	used := map[hook]bool{}
	taken := map[string]bool{}
	for _, job := range jobs {
		used[job.hook], taken[job.path] = true, true
		if l := live[job.hook]; l.Link != nil && l.path != job.path {
			l.path = a.dir.file(pinLinksDir, fmt.Sprintf("moving-%d-%d", job.IfIndex, job.Attach))
			errs = append(errs, replacePin(l, l.path))
			live[job.hook] = l
		}
	}
	for _, job := range jobs {
		if err := a.attach(job, live[job.hook]); err != nil {
			job.status.Error = err.Error()
			if errors.Is(err, ErrKernel) || errors.Is(err, ErrPrivileges) {
				errs = append(errs, err)
			}
		}
	}
	for at, l := range live {
		if !used[at] && !taken[l.path] {
			errs = append(errs, removePin(l.path))
		}
	}
	return all, errors.Join(errs...)
}

// plan says what the wanted devices are to have, and with which pins.
func (a *attacher) plan(wanted []device) ([]DeviceStatus, []attachment) {
	all := make([]DeviceStatus, len(wanted))
	var jobs []attachment
	owners := map[string]string{} // of pin names, by their common part
	for i, dev := range wanted {
		status := &all[i]
		*status = DeviceStatus{Name: dev.Name, IfIndex: dev.Index}
		stem := linkPinName(dev.Name, "")
		owner, taken := owners[stem]
		switch {
		case dev.Index == 0:
			status.Error = "there is no such device; it gets its programs when it appears"
			continue
		case !dev.Ethernet:
			status.Error = "its frames have no Ethernet header, which the programs expect"
			continue
		case taken:
			status.Error = fmt.Sprintf("its pins would have the names of those of device %s: rename one of the two", owner)
			continue
		}
		owners[stem] = dev.Name
		status.Programs = make([]ProgramStatus, len(a.programs))
		for j, p := range a.programs {
			status.Programs[j] = ProgramStatus{Name: p.Name, Direction: p.direction().String()}
			jobs = append(jobs, attachment{
				hook:    hook{dev.Index, p.Attach},
				program: p,
				path:    a.dir.file(pinLinksDir, linkPinName(dev.Name, p.Name)),
				status:  &status.Programs[j],
			})
		}
	}
	return all, jobs
}

// attach makes a hook run its program by a link that is pinned where it should be, beginning with has, which has no Link
// if there is none.
func (a *attacher) attach(job attachment, has pinnedLink) error {
	switch {
	case has.Link == nil:
		l, err := createLink(job)
		if err != nil {
			return err
		}
		defer l.Close()
		has = l
	case has.Program != job.ID:
		if err := has.Update(job.handle); err != nil {
			return explain("update "+job.Name, err)
		}
	}
	if has.path != job.path {
		if err := replacePin(has, job.path); err != nil {
			return err
		}
	}
	job.status.LinkID, job.status.ProgramID = uint32(has.ID), uint32(job.ID)
	return nil
}

// createLink attaches a program behind those of others and pins the link. An agent that dies in between leaves nothing.
func createLink(job attachment) (pinnedLink, error) {
	l, err := link.AttachTCX(link.TCXOptions{Interface: job.IfIndex, Program: job.handle, Attach: job.Attach})
	if err != nil {
		return pinnedLink{}, explain("attach "+job.Name, err)
	}
	info, err := l.Info()
	if err == nil {
		err = replacePin(l, job.path)
	}
	if err != nil {
		_ = l.Close()
		return pinnedLink{}, fmt.Errorf("attach %s: %w", job.Name, err)
	}
	return pinnedLink{Link: l, ID: info.ID, Program: job.ID, path: job.path}, nil
}

// replacePin pins l at path, in place of what is there, and away from where it is.
func replacePin(l link.Link, path string) error {
	if err := removePin(path); err != nil {
		return err
	}
	if err := l.Pin(path); err != nil {
		return explain("pin link at "+path, err)
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
