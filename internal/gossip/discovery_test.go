// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// names is a resolver.
type names map[string][]string

var errNoSuchHost = errors.New("no such host")

func (n names) LookupNetIP(_ context.Context, network, host string) (ips []netip.Addr, err error) {
	if network != "ip" {
		return nil, fmt.Errorf("network %q", network)
	}
	for _, s := range n[host] {
		ips = append(ips, netip.MustParseAddr(s))
	}
	if ips == nil {
		err = errNoSuchHost
	}
	return ips, err
}

func addrs(t *testing.T, d Discovery, want ...string) error {
	t.Helper()
	got, err := d.Addrs(context.Background())
	texts := []string{}
	for _, a := range got {
		texts = append(texts, a.String())
	}
	if !slices.Equal(texts, want) && len(texts)+len(want) > 0 {
		t.Errorf("%v, want %v", texts, want)
	}
	return err
}

func TestSeedsAndDNS(t *testing.T) {
	r := names{"pods": {"10.0.0.1", "::ffff:10.0.0.2", "2001:db8::1"}, "one": {"10.0.0.9"}}
	if err := addrs(t, DNS(r, "pods:7946"), "10.0.0.1:7946", "10.0.0.2:7946", "[2001:db8::1]:7946"); err != nil {
		t.Error(err)
	}
	r["pods"] = []string{"10.0.0.3"} // a name is asked again each time
	err := addrs(t, Seeds(r, "one:1", "gone:2", "pods:3", "[::1]:4", "nonsense"), "10.0.0.9:1", "10.0.0.3:3", "[::1]:4")
	if !errors.Is(err, errNoSuchHost) || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("%v", err)
	}
}

// stuck is a resolver that answers to the end of its context only.
type stuck struct{}

func (stuck) LookupNetIP(ctx context.Context, _, _ string) ([]netip.Addr, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestOneNameDoesNotHoldUpTheRest(t *testing.T) {
	err := addrs(t, Seeds(stuck{}, "hangs:1", "10.0.0.1:2"), "10.0.0.1:2")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// partly is a resolver that knows one name, and answers nothing for others.
type partly struct{ known string }

func (p partly) LookupNetIP(ctx context.Context, _, host string) ([]netip.Addr, error) {
	if host != p.known {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return []netip.Addr{netip.MustParseAddr("10.0.0.1")}, ctx.Err()
}

// Names that get no answer leave time for those behind them, and so does a whole
// Discovery that gets none.
func TestNamesAreLookedUpSideBySide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), 3*lookupTime/2)
		defer cancel()
		var hosts []string
		for i := range 8 {
			hosts = append(hosts, fmt.Sprintf("dead%d:1", i))
		}
		got, err := Seeds(partly{"alive"}, append(hosts, "alive:1")...).Addrs(ctx)
		if len(got) != 1 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, %v", got, err)
		}

		n := &Node{ctx: t.Context(), t: bare(), discovery: []Discovery{blocked{}, Seeds(partly{"alive"}, "alive:1")}}
		if got, err = n.discover(); len(got) != 1 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, %v", got, err)
		}
	})
}

type blocked struct{}

func (blocked) Addrs(ctx context.Context) ([]netip.AddrPort, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A pipe that nobody writes into is refused, and not waited for.
func TestFileIsRegular(t *testing.T) {
	if err := addrs(t, File(names{}, t.TempDir())); err == nil || !strings.Contains(err.Error(), "is no regular file") {
		t.Errorf("%v", err)
	}
}

func TestFileIsReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "peers")
	d := File(names{"pods": {"10.0.0.7"}}, path)
	if err := addrs(t, d); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	write := func(text string, at int) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		when := time.Unix(int64(1_000_000+at), 0)
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
	}
	write("# ours\n\n10.0.0.1:1 # first\n  pods:2\r\nwithout port\n:3\n", 1)
	err := addrs(t, d, "10.0.0.1:1", "10.0.0.7:2")
	if err == nil || !strings.Contains(err.Error(), "peers:5") || !strings.Contains(err.Error(), "peers:6") {
		t.Errorf("%v", err)
	}
	write("10.0.0.2:2\n", 2)
	if err := addrs(t, d, "10.0.0.2:2"); err != nil {
		t.Error(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := addrs(t, d, "10.0.0.2:2"); !errors.Is(err, os.ErrNotExist) { // the last content counts
		t.Errorf("%v", err)
	}
}

func FuzzFile(f *testing.F) {
	f.Add([]byte("a:1\n# b:2\n"))
	f.Add([]byte("[::1]:7946 # x\r\n:0\n:::"))
	f.Fuzz(func(t *testing.T, b []byte) {
		hosts, _ := parseFile("f", b)
		for _, h := range hosts {
			if _, port, err := splitHostPort(h); err != nil || port == 0 || strings.ContainsAny(h, "#\n") {
				t.Fatalf("%q", h)
			}
		}
	})
}

func TestNodeConfigValidate(t *testing.T) {
	good := NodeConfig{Config: Config{Self: crdt.Replica{Name: "a", Incarnation: 1}}}
	for _, c := range []NodeConfig{
		good,
		{Config: good.Config, Bind: "127.0.0.1:0", Advertise: "10.0.0.1:7946", Network: TCP, Seeds: []string{"a:1", "[::1]:2"}, DNS: "b:3", File: "f"},
		{Config: good.Config, Bind: "[::]:1"},
	} {
		if err := c.Validate(); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
	bad := NodeConfig{
		Config: Config{Zone: strings.Repeat("z", 65)}, Bind: "nowhere", Advertise: "0.0.0.0:1", Network: "sctp",
		Seeds: []string{"ok:1", "no-port", ":2", "host:0"}, DNS: "dns",
	}
	err := bad.Validate()
	if !errors.Is(err, ErrConfig) {
		t.Fatal(err)
	}
	for _, want := range []string{"Self.Name", "Self.Incarnation", "Zone", "Bind", "Advertise", "Network", "Seeds[1]", "Seeds[2]", "Seeds[3]", "DNS"} {
		if !strings.Contains(err.Error(), want+":") {
			t.Errorf("nothing about %s in %v", want, err)
		}
	}
	if strings.Contains(err.Error(), "Seeds[0]") {
		t.Error(err)
	}
	for _, a := range []string{"10.0.0.1", "host:1", "224.0.0.1:1", "10.0.0.1:0"} {
		if (NodeConfig{Config: good.Config, Advertise: a}).Validate() == nil {
			t.Errorf("Advertise %q is taken", a)
		}
	}
	if _, err := Start(bad, WithDiscovery(nil), WithKeyring(&Keyring{}), WithSection("", nil)); err == nil ||
		!strings.Contains(err.Error(), "WithDiscovery") || !strings.Contains(err.Error(), "WithKeyring") || !strings.Contains(err.Error(), "WithSection") || !strings.Contains(err.Error(), "Network") {
		t.Errorf("not all of it: %v", err)
	}
}
