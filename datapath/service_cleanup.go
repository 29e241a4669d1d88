// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/weftmesh/weft/bpf"
)

// services removes what makes sockets reach services: the links, then the programs and maps that they need.
func (c *cleaner) services() error {
	names, err := c.list(pinServicesDir)
	if err != nil || len(names) == 0 {
		return err
	}
	specs, err := allServiceMaps()
	if err != nil {
		return err
	}
	ours := map[ebpf.ProgramID]bool{}
	for _, p := range bpf.ServicePrograms {
		if id, err := programAt(c.dir.file(pinServicesDir, p.Name)); err == nil {
			ours[ebpf.ProgramID(id)] = true
		}
	}
	for _, kind := range []string{"link", "program", "map"} {
		for _, name := range names {
			path := c.dir.file(pinServicesDir, name)
			if kindOfServicePin(name) != kind {
				continue
			}
			if why := notOurServicePin(kind, name, path, specs, ours); why != "" {
				c.keep(kind, path, why)
				continue
			}
			c.remove(kind, path, func() error {
				if kind == "link" {
					detachServiceLink(path)
				}
				return removePin(path)
			})
		}
	}
	return nil
}

// detachServiceLink ends a link now; without its pin it would end when the kernel comes to it.
func detachServiceLink(path string) {
	if l, err := link.LoadPinnedLink(path, nil); err == nil {
		_ = l.Detach() // a link that is detached already says so
		_ = l.Close()
	}
}

func kindOfServicePin(name string) string {
	switch {
	case strings.HasSuffix(name, pinServiceSuffix):
		return "link"
	case slices.ContainsFunc(bpf.ServicePrograms[:], func(p bpf.Program) bool { return p.Name == name }):
		return "program"
	}
	return "map"
}

// notOurServicePin says why a pin is not one of ours: by its name, and the type of what it holds.
func notOurServicePin(kind, name, path string, specs map[string]*ebpf.MapSpec, ours map[ebpf.ProgramID]bool) string {
	switch kind {
	case "link":
		return notOurServiceLink(path, ours)
	case "program":
		p, err := ebpf.LoadPinnedProgram(path, nil)
		if err != nil {
			return "it is no program: " + err.Error()
		}
		defer p.Close()
		if p.Type() != ebpf.CGroupSockAddr {
			return fmt.Sprintf("it is of type %s, and weft's is a %s", p.Type(), ebpf.CGroupSockAddr)
		}
		return ""
	}
	for inSpec, pin := range servicePins {
		if pin != name {
			continue
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return "it is no map: " + err.Error()
		}
		defer m.Close()
		if want := specs[inSpec].Type; m.Type() != want {
			return fmt.Sprintf("it is of type %s, and weft's is a %s", m.Type(), want)
		}
		return ""
	}
	return notOfAnotherVersion(path, name)
}

// notOurServiceLink says why a link is not ours: one that runs a program of ours, or none any more.
func notOurServiceLink(path string, ours map[ebpf.ProgramID]bool) string {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return "it is no link: " + err.Error()
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return err.Error()
	}
	if at := info.Cgroup(); at == nil || at.CgroupId != 0 && !ours[info.Program] {
		return "it runs a program that is not pinned as one of weft's"
	}
	return ""
}
