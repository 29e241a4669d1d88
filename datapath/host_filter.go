// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// clsactHandle is where a clsact qdisc stands.
const clsactHandle = 0xffff0000

// filters lists the filters of one direction of a device; none where the device or the qdisc does not exist.
func (h *host) filters(index int, parent uint32) (all []netlink.Filter, err error) {
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	err = dump("list filters", func() error {
		all, err = h.handle.FilterList(link, parent)
		return err
	})
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	return all, err
}

// setFilter attaches a program, or puts it in the place of the one that our filter runs. No packet passes in between.
func (h *host) setFilter(job attachment) error {
	return h.handle.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: job.IfIndex, Parent: parentOf(job.Attach), Handle: filterHandle, Priority: job.priority(), Protocol: unix.ETH_P_ALL,
		},
		Fd: job.handle.FD(), Name: job.Name, DirectAction: true,
	})
}

// removeFilter removes a filter; an absent one is fine.
func (h *host) removeFilter(f *netlink.BpfFilter) error {
	err := h.handle.FilterDel(f)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("remove filter %s at index %d: %w", f.Name, f.LinkIndex, err)
	}
	return nil
}

// clsact returns the kind of the qdisc that stands where clsact would, "" for none.
func (h *host) clsact(index int) (kind string, err error) {
	link, err := h.handle.LinkByIndex(index)
	if err != nil {
		var missing netlink.LinkNotFoundError
		if errors.As(err, &missing) {
			err = unix.ENODEV
		}
		return "", err
	}
	err = dump("list qdiscs", func() error {
		kind = ""
		list, err := h.handle.QdiscList(link)
		for _, q := range list {
			if q.Attrs().Parent == netlink.HANDLE_CLSACT {
				kind = q.Type()
			}
		}
		return err
	})
	return kind, err
}

func clsactOf(index int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: clsactHandle, Parent: netlink.HANDLE_CLSACT,
	}}
}

func (h *host) addClsact(index int) error {
	if err := h.handle.QdiscAdd(clsactOf(index)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add qdisc clsact: %w", err)
	}
	return nil
}

func (h *host) removeClsact(index int) error {
	if err := h.handle.QdiscDel(clsactOf(index)); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove qdisc clsact at index %d: %w", index, err)
	}
	return nil
}
