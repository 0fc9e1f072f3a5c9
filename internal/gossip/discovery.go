// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Discovery finds addresses at which processes of the fleet may be. A [Node] calls all its
// discoveries at once, every 1 to 5 s, so Addrs should be cheap, and must return when ctx ends.
// Addresses that come with an error are used too. Addrs may also return this process, dead ones,
// and addresses that another discovery returns.
type Discovery interface {
	Addrs(ctx context.Context) ([]netip.AddrPort, error)
}

// Resolver looks up host names; *net.Resolver is one. Several goroutines call it. It must return
// when ctx ends.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Seeds returns a fixed list of "host:port", whose host names are looked up each time. A nil
// resolver is net.DefaultResolver.
func Seeds(resolver Resolver, seeds ...string) Discovery {
	return list{resolver: resolver, hosts: seeds}
}

// DNS returns all addresses, A and AAAA, of one name, "name:port": the processes behind a headless
// service. It is a list of one.
func DNS(resolver Resolver, name string) Discovery {
	return list{resolver: resolver, hosts: []string{name}}
}

type list struct {
	resolver Resolver
	hosts    []string
}

// Addrs looks up the names in parallel, and returns when all lookups have ended. A name that gets
// no answer delays the lookups of others only if as many as lookups get none.
func (l list) Addrs(ctx context.Context) ([]netip.AddrPort, error) {
	found := make([][]netip.AddrPort, len(l.hosts))
	wrong := make([]error, len(l.hosts))
	var wg sync.WaitGroup
	slots := make(chan struct{}, lookups)
	for i, hp := range l.hosts {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			found[i], wrong[i] = resolve(ctx, l.resolver, hp)
		})
	}
	wg.Wait()
	return slices.Concat(found...), errors.Join(wrong...)
}

const (
	lookups    = 16          // most names at once
	lookupTime = time.Second // limit for one name
)

func resolve(ctx context.Context, r Resolver, hostPort string) ([]netip.AddrPort, error) {
	host, port, err := splitHostPort(hostPort)
	if err != nil {
		return nil, err
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(ip.Unmap(), port)}, nil
	}
	if r == nil {
		r = net.DefaultResolver
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	ips, err := r.LookupNetIP(ctx, "ip", host)
	found := make([]netip.AddrPort, 0, len(ips))
	for _, ip := range ips {
		found = append(found, netip.AddrPortFrom(ip.Unmap(), port))
	}
	if err != nil {
		err = fmt.Errorf("gossip: discovery: %w", err)
	}
	return found, err
}

func splitHostPort(s string) (host string, port uint16, err error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, fmt.Errorf("gossip: discovery: %q is not host:port: %w", s, err)
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil || n == 0 || host == "" {
		return "", 0, fmt.Errorf("gossip: discovery: %q has no host or no port in [1, 65535]", s)
	}
	return host, uint16(n), nil
}

// maxFile is the most bytes that are read of a file.
const maxFile = 1 << 20

// File returns the "host:port" lines of a file. A # begins a comment. The file is read again when
// its time or size has changed. A line that is no address is left out and reported. When the file
// cannot be read, its last content counts. A nil resolver is net.DefaultResolver.
func File(resolver Resolver, path string) Discovery {
	return &file{path: path, list: list{resolver: resolver}}
}

type file struct {
	path string

	mu    sync.Mutex
	list  list
	read  bool
	time  time.Time
	size  int64
	wrong error // faults of the lines
}

func (f *file) Addrs(ctx context.Context) ([]netip.AddrPort, error) {
	f.mu.Lock()
	unread := f.reload()
	hosts, wrong := f.list, f.wrong
	f.mu.Unlock()
	addrs, err := hosts.Addrs(ctx)
	return addrs, errors.Join(unread, wrong, err)
}

func (f *file) reload() error {
	info, err := os.Stat(f.path)
	if err != nil {
		return fmt.Errorf("gossip: discovery: %w", err)
	}
	if f.read && info.ModTime().Equal(f.time) && info.Size() == f.size {
		return nil
	}
	if !info.Mode().IsRegular() { // opening another kind might never return
		return fmt.Errorf("gossip: discovery: %s is no regular file", f.path)
	}
	in, err := os.Open(f.path)
	if err != nil {
		return fmt.Errorf("gossip: discovery: %w", err)
	}
	defer func() { _ = in.Close() }()
	text, err := io.ReadAll(io.LimitReader(in, maxFile))
	if err != nil {
		return fmt.Errorf("gossip: discovery: %w", err)
	}
	f.list.hosts, f.wrong = parseFile(f.path, text)
	f.read, f.time, f.size = true, info.ModTime(), info.Size()
	return nil
}

func parseFile(path string, text []byte) (hosts []string, _ error) {
	var wrong []error
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, maxFile+1)
	for n := 1; lines.Scan(); n++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if _, _, err := splitHostPort(line); err != nil {
			wrong = append(wrong, fmt.Errorf("%s:%d: %w", path, n, err))
			continue
		}
		hosts = append(hosts, line)
	}
	return hosts, errors.Join(wrong...)
}

// parseBind reads where to listen; an empty host is all addresses.
func parseBind(s string) (netip.AddrPort, error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil {
		return netip.AddrPort{}, err
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	ip := netip.IPv6Unspecified()
	if host != "" {
		if ip, err = netip.ParseAddr(host); err != nil {
			return netip.AddrPort{}, err
		}
	}
	return netip.AddrPortFrom(ip, uint16(port)), nil
}

// ownAddr guesses the address by which others reach this host, among its global unicast addresses:
// IPv4 before IPv6, then private before public. If there are none, it is the loopback.
func ownAddr() netip.Addr {
	best := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	rank := 0
	addrs, _ := net.InterfaceAddrs()
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		ip, ok := netip.AddrFromSlice(n.IP)
		if ip = ip.Unmap(); !ok || !ip.IsGlobalUnicast() {
			continue
		}
		r := 1
		if ip.IsPrivate() {
			r = 2
		}
		if ip.Is4() {
			r += 2
		}
		if r > rank {
			best, rank = ip, r
		}
	}
	return best
}
