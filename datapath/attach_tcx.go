// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// pinnedLink is a link of ours that runs at its hook in this network namespace.
type pinnedLink struct {
	link.Link
	ID      link.ID
	Program ebpf.ProgramID
	path    string // of its pin; "" if somebody removed that
	name    string // of the program, as its pin has it
	place   int    // among all programs of the hook
}

// programOfLink is the program in the name of a link's pin; none if it is another's.
func programOfLink(pin string) bpf.Program {
	for _, p := range bpf.DevicePrograms() {
		if strings.HasSuffix(pin, "-"+p.Name) {
			return p
		}
	}
	return bpf.Program{}
}

// tcxAttacher attaches by links to tcx hooks, pinned. The links that are in place are kept open too: one whose pin is
// removed would end with it, and goes on like this until its pin is put back.
type tcxAttacher struct {
	dir      *pinDir
	programs []program
	held     map[hook]pinnedLink
	drift    int
}

var _ attacher = (*tcxAttacher)(nil)

// Close lets go of the links. What is pinned goes on.
func (a *tcxAttacher) Close() {
	closeLinks(a.held)
	a.held = nil
}

// links returns the links that run, by their hook, and the paths of pins that hold no such link: the device is gone or in
// another network namespace, the link was detached, or the pin is of a version with other programs. The links are to be
// closed.
func (a *tcxAttacher) links() (live map[hook]pinnedLink, dead []string, err error) {
	files, err := os.ReadDir(a.dir.file(pinLinksDir))
	if err != nil {
		return nil, nil, explain("list pinned links", err)
	}
	live = map[hook]pinnedLink{}
	for _, file := range files {
		path := a.dir.file(pinLinksDir, file.Name())
		l, err := link.LoadPinnedLink(path, nil)
		var at hook
		var found pinnedLink
		if err == nil {
			found, at, err = a.inspect(l)
		}
		switch {
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE):
			closeLinks(live)
			return nil, nil, explain("open link "+path, err)
		case err != nil:
			dead = append(dead, path)
			continue
		}
		p := programOfLink(path)
		at.Behind = p.Behind
		if _, taken := live[at]; taken {
			_ = found.Close()
			dead = append(dead, path)
			continue
		}
		found.path, found.name = path, p.Name
		live[at] = found
	}
	for was, l := range a.held {
		if live[was].Link != nil {
			continue
		}
		// An error means that it runs no more.
		if again, err := copyLink(l.Link); err == nil {
			if found, at, err := a.inspect(again); err == nil {
				found.name, at.Behind = l.name, was.Behind
				live[at] = found
			}
		}
	}
	return live, dead, nil
}

// copyLink returns a second handle of a link, which knows of no pin.
func copyLink(l link.Link) (link.Link, error) {
	open, ok := l.(interface{ FD() int })
	if !ok {
		return nil, errDeadLink
	}
	fd, err := unix.FcntlInt(uintptr(open.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return link.NewFromFD(fd)
}

// errDeadLink indicates a link that runs no program here.
var errDeadLink = errors.New("link runs no program here")

// inspect looks at a link, and closes it with an error if it is none of ours that runs. That it names an index does not
// mean much, since the device may have moved to another network namespace, where ours has another device of that index:
// the hook itself is asked whether it has the link.
func (a *tcxAttacher) inspect(l link.Link) (_ pinnedLink, _ hook, err error) {
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
	for i, p := range attached.Programs {
		if id, ok := p.LinkID(); ok && id == info.ID {
			return pinnedLink{Link: l, ID: info.ID, Program: info.Program, place: i}, at, nil
		}
	}
	return pinnedLink{}, hook{}, errDeadLink
}

func closeLinks(links map[hook]pinnedLink) {
	for _, l := range links {
		_ = l.Close()
	}
}

func (a *tcxAttacher) drifted() (n int) {
	n, a.drift = a.drift, 0
	return n
}

func (a *tcxAttacher) intact() bool {
	for at, l := range a.held {
		info, err := l.Info()
		if err != nil || info.TCX() == nil || int(info.TCX().Ifindex) != at.IfIndex {
			return false
		}
		if _, err := os.Lstat(l.path); err != nil {
			return false
		}
	}
	return true
}

func (a *tcxAttacher) sync(wanted, sticky []device) ([]DeviceStatus, error) {
	live, dead, err := a.links()
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, path := range dead {
		errs = append(errs, removePin(path))
	}
	wanted = withSticky(wanted, sticky, a.programs, func(at hook) string { return live[at].name })
	all, jobs := plan(a.dir, a.programs, wanted)
	// Links whose device was renamed are moved aside before any gets its place, since devices may have swapped names.
	used := map[hook]bool{}
	taken := map[string]bool{}
	for _, job := range jobs {
		used[job.hook], taken[job.path] = true, true
		if l := live[job.hook]; l.path != "" && l.path != job.path {
			l.path = a.dir.file(pinLinksDir, fmt.Sprintf("moving-%d-%s", job.IfIndex, job.Name))
			errs = append(errs, replacePin(l, l.path))
			live[job.hook] = l
		}
	}
	held := map[hook]pinnedLink{}
	for _, job := range jobs {
		if was, is := a.held[job.hook], live[job.hook]; was.Link != nil && was.name == job.Name &&
			(is.Link == nil || is.path == "" || is.Program != was.Program) {
			a.drift++
		}
		has, behind := live[job.hook], live[job.behind()]
		if misplaced(job, live) {
			// A hook takes no program twice. Packets pass unseen in between, rather than untranslated.
			errs = append(errs, has.detach())
			has = pinnedLink{}
			delete(live, job.hook)
		}
		l, err := a.attach(job, has, behind)
		if err != nil {
			job.status.Error = err.Error()
			errs = append(errs, unrecoverable(err))
		}
		if l.Link != nil {
			held[job.hook] = l
		}
	}
	for at, l := range live {
		if used[at] {
			continue
		}
		if l.path != "" && !taken[l.path] {
			errs = append(errs, removePin(l.path))
		}
		_ = l.Close()
	}
	closeLinks(a.held)
	a.held = held
	return all, errors.Join(errs...)
}

func (a *tcxAttacher) compare(wanted, sticky []device) ([]Difference, error) {
	live, dead, err := a.links()
	if err != nil {
		return nil, err
	}
	defer closeLinks(live)
	wanted = withSticky(wanted, sticky, a.programs, func(at hook) string { return live[at].name })
	states, jobs := plan(a.dir, a.programs, wanted)
	found := unplannable(states)
	used := map[hook]bool{}
	for _, job := range jobs {
		used[job.hook] = true
		l := live[job.hook]
		d := Difference{Kind: KindLink, Object: job.device + " " + job.Name, Want: fmt.Sprintf("program %d", job.ID)}
		switch {
		case l.Link == nil:
			d.Have = "not attached"
		case l.Program != job.ID && !job.waits():
			d.Have = fmt.Sprintf("program %d", l.Program)
		case misplaced(job, live):
			d.Want, d.Have = "before the one that translates", "behind it"
		case l.path != job.path:
			d.Want, d.Have = "pinned at "+job.path, "pinned at "+l.path
			if l.path == "" {
				d.Have = "not pinned"
			}
		default:
			continue
		}
		found = append(found, d)
	}
	for at, l := range live {
		if !used[at] {
			found = append(found, Difference{Kind: KindLink, Object: l.path, Want: "absent", Have: fmt.Sprintf("attached at index %d", at.IfIndex)})
		}
	}
	for _, path := range dead {
		found = append(found, Difference{Kind: KindLink, Object: path, Want: "absent", Have: "a pin that runs no program here"})
	}
	return found, nil
}

// misplaced reports whether the program of a job runs behind the one of ours that is to run behind it.
func misplaced(job attachment, live map[hook]pinnedLink) bool {
	l, behind := live[job.hook], live[job.behind()]
	return l.Link != nil && behind.Link != nil && l.place > behind.place
}

// detach ends a link and removes its pin.
func (l pinnedLink) detach() error {
	err := l.Detach()
	if l.path != "" {
		err = errors.Join(err, removePin(l.path))
	}
	return errors.Join(err, l.Close())
}

// attach makes a hook run its program by a link that is pinned where it should be, beginning with has, which has no Link
// if there is none. A new link comes before behind, if that is there. It returns the link that is attached, whatever the
// error.
func (a *tcxAttacher) attach(job attachment, has, behind pinnedLink) (pinnedLink, error) {
	switch {
	case has.Link == nil:
		l, err := createLink(job, behind)
		if err != nil {
			return pinnedLink{}, err
		}
		has = l
	case has.Program != job.ID && !job.waits():
		if err := has.Update(job.handle); err != nil {
			return has, explain("update "+job.Name, err)
		}
		has.Program = job.ID
	}
	if has.path != job.path {
		if err := replacePin(has, job.path); err != nil {
			return has, err
		}
		has.path = job.path
	}
	has.name = job.Name
	job.status.Attached, job.status.LinkID, job.status.ProgramID = true, uint32(has.ID), uint32(has.Program)
	return has, nil
}

// createLink attaches a program behind those of others, or just before the one of ours that is to come behind it, and pins the
// link. An agent that dies in between leaves nothing.
func createLink(job attachment, behind pinnedLink) (pinnedLink, error) {
	options := link.TCXOptions{Interface: job.IfIndex, Program: job.handle, Attach: job.Attach}
	if behind.Link != nil {
		options.Anchor = link.BeforeLink(behind.Link)
	}
	l, err := link.AttachTCX(options)
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
	return pinnedLink{Link: l, ID: info.ID, Program: job.ID, path: job.path, name: job.Name}, nil
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
