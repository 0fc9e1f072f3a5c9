// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"
)

// DefaultPort is the port of a [Node], UDP and TCP.
const DefaultPort = 7946

// The networks of a [Node].
const (
	UDP = "udp"
	TCP = "tcp"
)

// NodeConfig is what an operator may set for a [Node]. What [Config] says must be
// set; otherwise the zero value is valid and means the documented defaults.
type NodeConfig struct {
	Config

	// Bind is the address and port that the node listens on, UDP and TCP alike:
	// "10.0.0.5:7946", "[::]:7946" or ":7946" for all of the host's addresses. Port
	// 0 is any that is free for both. Unset means "127.0.0.1:7946". [Start] refuses an
	// address that is not loopback without [WithKeyring], unless Insecure is set.
	Bind string

	// Insecure lets the node listen beyond loopback without a key. Whoever reaches
	// the port can then read and change what the fleet shares. The default is false.
	Insecure bool

	// Advertise is the address at which others reach this node, "ip:port", where
	// that is not the one it is bound to. Unset means Bind; and where that is all
	// addresses, the first private one of the host, or else the first. Over UDP it
	// matters to membership only, since peers answer where packets come from.
	Advertise string

	// Network is [UDP] or [TCP], the same in the whole fleet; unset means UDP. TCP
	// is for networks that drop UDP: packets travel over one stream to each peer,
	// and wait behind each other when the network loses one.
	Network string

	// Seeds are processes to begin with, "host:port". Host names are resolved again
	// whenever they are used. DNS is one name whose addresses are all processes,
	// "name:port", such as a headless service. File has one "host:port" a line, and
	// comments after #, and is read again when it has changed. They add up. With none
	// of them, and no [WithDiscovery], the node waits to be found.
	Seeds []string
	DNS   string
	File  string
}

// WithDefaults returns c with every unset field replaced by its default.
func (c NodeConfig) WithDefaults() NodeConfig {
	c.Config = c.Config.WithDefaults()
	def(&c.Bind, fmt.Sprintf("127.0.0.1:%d", DefaultPort))
	def(&c.Network, UDP)
	return c
}

// Validate reports everything that is wrong with c at once, as an error that
// is [ErrConfig], or nil. It looks nothing up.
func (c NodeConfig) Validate() error {
	wrong := []error{c.Config.Validate()}
	bad := func(field string, value any, want string) {
		wrong = append(wrong, fmt.Errorf("%w: %s: %v is not %s", ErrConfig, field, value, want))
	}
	c = c.WithDefaults()
	if _, err := parseBind(c.Bind); err != nil {
		bad("Bind", fmt.Sprintf("%q", c.Bind), `an address and a port, such as "10.0.0.5:7946" or ":7946"`)
	}
	if a, err := netip.ParseAddrPort(c.Advertise); c.Advertise != "" &&
		(err != nil || a.Addr().IsUnspecified() || a.Addr().IsMulticast() || a.Port() == 0) {
		bad("Advertise", fmt.Sprintf("%q", c.Advertise), `the address of one host and a port, such as "10.0.0.5:7946"`)
	}
	if c.Network != UDP && c.Network != TCP {
		bad("Network", fmt.Sprintf("%q", c.Network), `"udp" or "tcp"`)
	}
	for i, seed := range c.Seeds {
		if _, _, err := splitHostPort(seed); err != nil {
			bad(fmt.Sprintf("Seeds[%d]", i), fmt.Sprintf("%q", seed), `"host:port"`)
		}
	}
	if _, _, err := splitHostPort(c.DNS); c.DNS != "" && err != nil {
		bad("DNS", fmt.Sprintf("%q", c.DNS), `"name:port"`)
	}
	return errors.Join(wrong...)
}

// closed refuses an address that others reach without a key.
func (c NodeConfig) closed(keyed bool) error {
	// Validate reports a malformed address; the zero one is not loopback.
	if bind, _ := parseBind(c.WithDefaults().Bind); bind.Addr().Unmap().IsLoopback() || keyed || c.Insecure {
		return nil
	}
	return fmt.Errorf("%w: Bind: %q is not a loopback address, and there is no key: "+
		"make one with \"stormguard fleet keygen\" and pass it with WithKeyring (--keys), or set Insecure (--insecure)", ErrConfig, c.Bind)
}

// nodeOptions are what only a Node takes. New ignores them.
type nodeOptions struct {
	log       *slog.Logger
	clock     func() time.Duration
	keys      *Keyring
	discovery []Discovery
	resolver  Resolver
	faults    Faults
}

// WithLogger has a [Node] log its changes of state: members, displacement,
// discovery that begins to fail or works again. At slog's Debug level what
// memberlist says is there too. The default is silence. [Node.Close] waits for a line
// that is being written, so the handler must return.
func WithLogger(log *slog.Logger) Option {
	return optionFunc(func(o *options) { o.node.log = log })
}

// WithClock gives a [Node] its monotonic clock, which its sections that keep a
// clock must share; see [Clock]. It is called by several goroutines. The default
// counts from [Start].
func WithClock(clock func() time.Duration) Option {
	return optionFunc(func(o *options) { o.node.clock = clock })
}

// WithKeyring has a [Node] seal all that it sends, and refuse what is not sealed
// with a key of the ring. Without one nothing is encrypted or authenticated, and
// [Start] listens on loopback only; see NodeConfig's Insecure.
func WithKeyring(keys *Keyring) Option {
	return optionFunc(func(o *options) { o.node.keys = keys })
}

// WithDiscovery has a [Node] ask d too, every 1 to 5 s, for 2 s at most.
func WithDiscovery(d Discovery) Option {
	return optionFunc(func(o *options) { o.node.discovery = append(o.node.discovery, d) })
}

// WithResolver sets who resolves host names for NodeConfig's Seeds, DNS and File.
// The default is net.DefaultResolver.
func WithResolver(r Resolver) Option {
	return optionFunc(func(o *options) { o.node.resolver = r })
}

// WithFaults has a [Node] lose and delay what it sends, for tests.
func WithFaults(f Faults) Option {
	return optionFunc(func(o *options) { o.node.faults = f })
}

// Faults says what happens to what a [Node] sends. It is called by several
// goroutines at once.
type Faults interface {
	// Packet is asked for each packet; over TCP a lost one leaves the stream whole.
	Packet(to netip.AddrPort) (delay time.Duration, lost bool)
	// Dial is asked for each new stream; an error is that of the dial.
	Dial(to netip.AddrPort) error
}

// Clock returns a monotonic clock that counts from now, for a [Node] and the
// sections that share its time.
func Clock() func() time.Duration {
	start := time.Now()
	return func() time.Duration { return time.Since(start) }
}

func (o *options) collaborators() error {
	if o.node.log == nil {
		o.node.log = slog.New(slog.DiscardHandler)
	}
	if o.node.clock == nil {
		o.node.clock = Clock()
	}
	var wrong []error
	if o.node.keys != nil && o.node.keys.keys.Load() == nil {
		wrong = append(wrong, fmt.Errorf("%w: WithKeyring: no key; NewKeyring makes one", ErrConfig))
	}
	if slices.Contains(o.node.discovery, nil) {
		wrong = append(wrong, fmt.Errorf("%w: WithDiscovery: nil", ErrConfig))
	}
	return errors.Join(wrong...)
}
