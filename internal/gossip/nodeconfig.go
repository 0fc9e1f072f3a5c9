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

// NodeConfig holds an operator's settings of a [Node]. The required fields are those of [Config].
// Every other field may be unset, which means its documented default.
type NodeConfig struct {
	Config

	// Bind is the address and port at which the node listens, for UDP and TCP: "10.0.0.5:7946",
	// "[::]:7946", or ":7946" for all addresses of the host. Port 0 means any port that is free for
	// both. Unset means "127.0.0.1:7946". Without [WithKeyring], [Start] refuses an address that is
	// not loopback, unless Insecure is set.
	Bind string

	// Insecure lets the node listen beyond loopback without a key. Then anyone who reaches the port
	// can read and change the fleet's shared state. The default is false.
	Insecure bool

	// Advertise is the address at which others reach this node, "ip:port", if it is not the bound
	// one. Unset means Bind. If Bind is all addresses, unset means an IPv4 address of the host, a
	// private one if there is one, or else an IPv6 address. Over UDP only membership uses it, since
	// peers answer to the address that packets come from.
	Advertise string

	// Network is [UDP] or [TCP], the same in the whole fleet; unset means UDP. TCP is for networks
	// that drop UDP: packets travel over one stream to each peer. A packet that the network loses
	// then delays the packets behind it.
	Network string

	// Seeds are processes to contact first, "host:port". Host names are resolved again at each use.
	// Seeds, DNS, File and each [WithDiscovery] add up. With none of them, the node waits until
	// others find it.
	Seeds []string

	// DNS is one name, "name:port", whose addresses are all processes, such as a headless service.
	DNS string

	// File is the path of a file with one "host:port" a line, and comments after #. It is read
	// again when it has changed.
	File string
}

// WithDefaults returns c with every unset field replaced by its default.
func (c NodeConfig) WithDefaults() NodeConfig {
	c.Config = c.Config.WithDefaults()
	def(&c.Bind, fmt.Sprintf("127.0.0.1:%d", DefaultPort))
	def(&c.Network, UDP)
	return c
}

// Validate reports all faults of c at once, as an error that is [ErrConfig], or nil. It does no
// lookups.
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

// closed returns an error if others can reach the address, and there is neither a key nor Insecure.
func (c NodeConfig) closed(keyed bool) error {
	// Validate reports a malformed address. Here that is the zero address, which is not loopback.
	if bind, _ := parseBind(c.WithDefaults().Bind); bind.Addr().Unmap().IsLoopback() || keyed || c.Insecure {
		return nil
	}
	return fmt.Errorf("%w: Bind: %q is not a loopback address, and there is no key: "+
		"make one with \"stormguard fleet keygen\" and pass it with WithKeyring (--keys), or set Insecure (--insecure)", ErrConfig, c.Bind)
}

// nodeOptions are the options of a Node only. New ignores them.
type nodeOptions struct {
	log       *slog.Logger
	clock     func() time.Duration
	keys      *Keyring
	discovery []Discovery
	resolver  Resolver
	faults    Faults
}

// WithLogger has a [Node] log its changes of state: members, displacement, discovery that begins to
// fail or works again. At slog's Debug level it also logs memberlist's own lines. The default logs
// nothing. [Node.Close] waits for a line that is being written, so the handler must return.
func WithLogger(log *slog.Logger) Option {
	return optionFunc(func(o *options) { o.node.log = log })
}

// WithClock sets the monotonic clock of a [Node]. Sections that keep a clock must share it; see
// [Clock]. Several goroutines call it. The default counts from [Start].
func WithClock(clock func() time.Duration) Option {
	return optionFunc(func(o *options) { o.node.clock = clock })
}

// WithKeyring has a [Node] seal everything that it sends, and refuse everything that is not sealed
// with a key of the ring. Without a keyring nothing is encrypted or authenticated, and [Start]
// listens on loopback only; see NodeConfig's Insecure.
func WithKeyring(keys *Keyring) Option {
	return optionFunc(func(o *options) { o.node.keys = keys })
}

// WithDiscovery adds a source of addresses. A [Node] asks d every 1 to 5 s, for 2 s at most.
func WithDiscovery(d Discovery) Option {
	return optionFunc(func(o *options) { o.node.discovery = append(o.node.discovery, d) })
}

// WithResolver sets the resolver of the host names in NodeConfig's Seeds, DNS and File. The default
// is net.DefaultResolver.
func WithResolver(r Resolver) Option {
	return optionFunc(func(o *options) { o.node.resolver = r })
}

// WithFaults has a [Node] lose and delay packets that it sends, for tests.
func WithFaults(f Faults) Option {
	return optionFunc(func(o *options) { o.node.faults = f })
}

// Faults decides what happens to the packets and streams of a [Node]. Several goroutines call it at
// once.
type Faults interface {
	// Packet is called for each packet. Over TCP a lost packet leaves the stream whole.
	Packet(to netip.AddrPort) (delay time.Duration, lost bool)
	// Dial is called for each new stream. The dial returns its error.
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
