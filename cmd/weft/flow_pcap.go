// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/bpf"
)

// captureFile writes flows in the format pcapng (draft-ietf-opsawg-pcapng), which tcpdump and Wireshark read. A flow has
// no payload: what is written of a packet are its headers as far as the flow tells them, its length as it was, and, as its
// comment, verdict and identities. Checksums but that of IPv4 are 0, since they are of what is not there.
type captureFile struct {
	w       io.Writer
	file    *os.File          // nil: w is not ours to close
	devices map[string]uint32 // to the number of their description
}

// Kinds of blocks, options and links of pcapng.
const (
	blockSection, blockInterface, blockPacket = 0x0a0d0d0a, 1, 6

	optionEnd, optionComment, optionName, optionResolution = 0, 1, 2, 9

	linkRaw     = 101 // an IPv4 or IPv6 header comes first
	nanoseconds = 9   // 10 to the minus so many seconds are a tick

	etherHeader = 14 // bytes of a frame before it
)

// newCapture begins a file.
func newCapture(env environment, path string) (*captureFile, error) {
	c := &captureFile{w: env.stdout, devices: make(map[string]uint32)}
	if path != "-" {
		f, err := os.Create(path)
		if err != nil {
			return nil, err
		}
		c.w, c.file = f, f
	}
	section := binary.LittleEndian.AppendUint32(nil, 0x1a2b3c4d) // of this byte order
	section = binary.LittleEndian.AppendUint16(section, 1)       // version 1.0
	section = binary.LittleEndian.AppendUint16(section, 0)
	section = binary.LittleEndian.AppendUint64(section, ^uint64(0)) // of no known length
	if err := c.block(blockSection, section); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Close ends the file.
func (c *captureFile) Close() error {
	if c.file == nil {
		return nil
	}
	return c.file.Close()
}

// write adds a packet. A flow that is none of IP has no headers that could be written, and is passed over.
func (c *captureFile) write(f *api.Flow) error {
	headers := packetHeaders(f)
	if headers == nil {
		return nil
	}
	device, known := c.devices[f.Device]
	if !known {
		device = uint32(len(c.devices))
		c.devices[f.Device] = device
		description := binary.LittleEndian.AppendUint16(nil, linkRaw)
		description = append(description, 0, 0, 0, 0, 0, 0) // reserved; no limit of what is kept of a packet
		description = appendOption(description, optionName, []byte(f.Device))
		description = appendOption(description, optionResolution, []byte{nanoseconds})
		if err := c.block(blockInterface, appendOption(description, optionEnd, nil)); err != nil {
			return err
		}
	}
	at, length := uint64(f.Time.UnixNano()), max(int(f.Length)-etherHeader, len(headers))
	packet := binary.LittleEndian.AppendUint32(nil, device)
	packet = binary.LittleEndian.AppendUint32(packet, uint32(at>>32))
	packet = binary.LittleEndian.AppendUint32(packet, uint32(at))
	packet = binary.LittleEndian.AppendUint32(packet, uint32(len(headers)))
	packet = binary.LittleEndian.AppendUint32(packet, uint32(length))
	packet = padded(append(packet, headers...))
	packet = appendOption(packet, optionComment, []byte(strings.ToValidUTF8(flowText(f), "?")))
	return c.block(blockPacket, appendOption(packet, optionEnd, nil))
}

// block writes a block, whose length stands at both its ends.
func (c *captureFile) block(kind uint32, body []byte) error {
	const around = 12
	b := binary.LittleEndian.AppendUint32(nil, kind)
	b = binary.LittleEndian.AppendUint32(b, uint32(around+len(body)))
	b = binary.LittleEndian.AppendUint32(append(b, body...), uint32(around+len(body)))
	_, err := c.w.Write(b)
	return err
}

// appendOption adds an option to a block whose length is a multiple of 4.
func appendOption(b []byte, code uint16, value []byte) []byte {
	value = value[:min(len(value), 0xffff)]
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(value)))
	return padded(append(b, value...))
}

func padded(b []byte) []byte { return append(b, make([]byte, -len(b)&3)...) }

// protocolNumber is the inverse of protocolName.
func protocolNumber(name string) (uint8, bool) {
	for _, number := range []uint8{bpf.ProtocolTCP, bpf.ProtocolUDP, bpf.ProtocolICMP, bpf.ProtocolICMPv6, bpf.ProtocolSCTP} {
		if protocolName(number) == name {
			return number, true
		}
	}
	number, err := strconv.ParseUint(name, 10, 8)
	return uint8(number), err == nil
}

// packetHeaders are the headers of the packet that a flow is about, from IP on; nil if it has no addresses.
func packetHeaders(f *api.Flow) []byte {
	protocol, ok := protocolNumber(f.Protocol)
	src, dst := f.Source.IP.Unmap(), f.Destination.IP.Unmap()
	if !ok || !src.IsValid() || !dst.IsValid() || src.Is4() != dst.Is4() {
		return nil
	}
	transport := transportHeader(f, protocol)
	if src.Is4() {
		return append(header4(f, protocol, src, dst), transport...)
	}
	const version, hopLimit, size = 6 << 28, 64, 40
	b := binary.BigEndian.AppendUint32(nil, version)
	b = binary.BigEndian.AppendUint16(b, uint16(max(int(f.Length)-etherHeader-size, len(transport))))
	b = append(b, protocol, hopLimit)
	return append(slices.Concat(b, src.AsSlice(), dst.AsSlice()), transport...)
}

// header4 is a header of IPv4 (RFC 791) without options.
func header4(f *api.Flow, protocol uint8, src, dst netip.Addr) []byte {
	const versionAndWords, ttl, checksumAt = 0x45, 64, 10
	b := []byte{versionAndWords, 0}
	b = binary.BigEndian.AppendUint16(b, uint16(max(int(f.Length)-etherHeader, 20)))
	b = append(b, 0, 0, 0, 0, ttl, protocol, 0, 0)
	b = slices.Concat(b, src.AsSlice(), dst.AsSlice())
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(b[checksumAt:], ^uint16(sum))
	return b
}

// transportHeader is what a flow tells of the header behind that of IP; nothing of a protocol that has no ports.
func transportHeader(f *api.Flow, protocol uint8) []byte {
	ports := binary.BigEndian.AppendUint16(nil, f.Source.Port)
	ports = binary.BigEndian.AppendUint16(ports, f.Destination.Port)
	switch protocol {
	case bpf.ProtocolTCP:
		const words, flagsAt, size = 5 << 4, 13, 20
		b := append(ports, make([]byte, size-len(ports))...)
		b[flagsAt-1] = words
		for i, name := range tcpFlagNames {
			if slices.Contains(strings.Split(f.TCPFlags, ","), name) {
				b[flagsAt] |= 1 << i
			}
		}
		return b
	case bpf.ProtocolUDP:
		ip := 20
		if !f.Source.IP.Unmap().Is4() {
			ip = 40
		}
		return append(binary.BigEndian.AppendUint16(ports, uint16(max(int(f.Length)-etherHeader-ip, 8))), 0, 0)
	case bpf.ProtocolSCTP:
		return append(ports, make([]byte, 8)...)
	case bpf.ProtocolICMP, bpf.ProtocolICMPv6:
		var kind, code uint8
		if _, err := fmt.Sscanf(f.ICMP, "%d/%d", &kind, &code); err != nil {
			return nil
		}
		return []byte{kind, code, 0, 0, 0, 0, 0, 0}
	}
	return nil
}
