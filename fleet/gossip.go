// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// Gossip says where a process listens, and where it looks for the others. The zero value is
// valid: loopback only, and nobody to ask.
type Gossip struct {
	// Bind is the address and port that the process listens on, UDP and TCP alike:
	// "10.0.0.5:7946", "[::]:7946" or ":7946" for all of the host's addresses. Port
	// 0 is any that is free for both. Unset means "127.0.0.1:7946". [Start] refuses an
	// address that is not loopback without [WithKeyring], unless Insecure is set.
	Bind string

	// Insecure lets the process listen beyond loopback without a key. Whoever reaches
	// the port can then read and change what the fleet shares. The default is false.
	Insecure bool

	// Advertise is the address at which others reach this process, "ip:port", where
	// that is not the one it is bound to. Unset means Bind; and where that is all
	// addresses, the first private one of the host, or else the first. Over UDP it
	// matters to membership only, since peers answer where packets come from.
	Advertise string

	// Network is "udp" or "tcp", the same in the whole fleet; unset means "udp". TCP
	// is for networks that drop UDP: packets travel over one stream to each peer,
	// and wait behind each other when the network loses one.
	Network string

	// Seeds are processes to begin with, "host:port". Host names are resolved again
	// whenever they are used. Seeds, DNS, File and [WithDiscovery] add up. With none of
	// them the process waits to be found.
	Seeds []string

	// DNS is one name whose addresses are all processes, "name:port", such as a headless
	// service.
	DNS string

	// File has one "host:port" a line, and comments after #. It is read again when it has
	// changed.
	File string

	// Zone and Region say where this process runs. Peers of the own zone, then
	// of the own region, are served first. Up to 64 bytes each; unset is one more
	// place.
	Zone, Region string

	// Floor is the least time between two packets to one peer. A change that is not
	// acknowledged is sent again at each floor, so it reaches its peer
	// within (m-1)·Floor and the delay, where m packets are as good as sure to
	// get one through: 5 at 35 % independent loss and p99. In [100µs, 1s];
	// unset means 2 ms.
	Floor time.Duration

	// KeepAlive is how long a peer waits at most for a packet when there is
	// nothing to say. A process sends two packets in that time, to all its peers
	// together: with more than two peers each has to wait longer, and is told how long
	// that may be. A peer is silent after that and 20 keep-alives, and lost after that and
	// 200: then its address is tried every 1 to 5 s. In [Floor, 1m]; unset means 50 ms, or
	// Floor if that is more. It should be the same everywhere.
	KeepAlive time.Duration

	// MaxPeers bounds the peers that are known, dead ones included. When it is full, the
	// one that was lost for longest makes room: it is displaced, and is told so if it comes
	// back. If none was lost for ten minutes the newcomer is refused and counted. In
	// [1, 4096]; unset means 512. A peer costs about 10 KB.
	MaxPeers int
}

func (g Gossip) config() gossip.NodeConfig {
	return gossip.NodeConfig{
		Config: gossip.Config{Zone: g.Zone, Region: g.Region, Floor: g.Floor, KeepAlive: g.KeepAlive, MaxPeers: g.MaxPeers},
		Bind:   g.Bind, Insecure: g.Insecure, Advertise: g.Advertise, Network: g.Network, Seeds: g.Seeds, DNS: g.DNS, File: g.File,
	}
}

var (
	// ErrClosed says that a Process has been closed.
	ErrClosed = gossip.ErrClosed

	// ErrDisplaced says that a later incarnation of the process's name is at work, or that
	// a peer gave this one up for newcomers, see [Gossip]'s MaxPeers.
	ErrDisplaced = gossip.ErrDisplaced
)

// Discovery says where processes of the fleet may be. It is asked every 1 to 5 s, so it
// should be cheap, and must not outlast ctx. Addresses that come with an error are used
// too. They may be of this process, of dead ones, and repeat.
type Discovery interface {
	Addrs(ctx context.Context) ([]netip.AddrPort, error)
}

// WithDiscovery has the process ask d too, beside Gossip's Seeds, DNS and File.
func WithDiscovery(d Discovery) Option {
	return func(o *options) { o.gossip = append(o.gossip, gossip.WithDiscovery(d)) }
}

// A Keyring is the keys that a fleet's processes share. One of them, the primary, seals
// what is sent; all of them open what comes in. It is safe for concurrent use, and a
// change counts from the next packet on. [NewKeyring] makes one.
//
// To change keys while the fleet runs: Add the new one everywhere, then Use it
// everywhere, then Remove the old one everywhere, each step only when the one
// before is done in every process.
type Keyring gossip.Keyring

// NewKey makes a key: 32 random bytes.
func NewKey() []byte {
	key := make([]byte, gossip.KeySize)
	_, _ = rand.Read(key) // never fails
	return key
}

// NewKeyring returns a keyring; the first key is the primary. The error is [ErrConfig]
// unless there are 1 to 8 keys of 32 bytes each.
func NewKeyring(keys ...[]byte) (*Keyring, error) {
	k, err := gossip.NewKeyring(keys...)
	return (*Keyring)(k), keyError(err)
}

// Add has packets opened with a key too. A key that is there is left alone. The
// error is [ErrConfig].
func (k *Keyring) Add(key []byte) error { return keyError((*gossip.Keyring)(k).Add(key)) }

// Use makes a key that is in the keyring the primary. The error is [ErrConfig].
func (k *Keyring) Use(key []byte) error { return keyError((*gossip.Keyring)(k).Use(key)) }

// Remove takes a key out; one that is not there does not matter. The primary
// cannot be removed: that is [ErrConfig].
func (k *Keyring) Remove(key []byte) error { return keyError((*gossip.Keyring)(k).Remove(key)) }

// Fingerprints names the keys, the primary first, by the first eight bytes of
// their SHA-256: enough to compare two processes, of no use to open anything.
func (k *Keyring) Fingerprints() []string { return (*gossip.Keyring)(k).Fingerprints() }

// WithKeyring has the process seal all that it sends, and refuse what is not sealed
// with a key of the ring. Without one nothing is encrypted or authenticated, and [Start]
// listens on loopback only.
func WithKeyring(k *Keyring) Option {
	return func(o *options) { o.gossip = append(o.gossip, gossip.WithKeyring((*gossip.Keyring)(k))) }
}

func keyError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrConfig, err)
}
