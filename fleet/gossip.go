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

// Gossip says where a process listens and where it looks for the others. The zero value is valid:
// it listens on loopback only, and asks no other process.
type Gossip struct {
	// Bind is the address and port that the process listens on, for UDP and TCP: "10.0.0.5:7946";
	// "[::]:7946" or ":7946" for all addresses of the host. Port 0 takes any port that is free for
	// both. Unset means "127.0.0.1:7946". Beyond loopback [Start] needs [WithKeyring], unless
	// Insecure is set.
	Bind string

	// Insecure lets the process listen beyond loopback without a key. Then everybody who reaches
	// the port can read and change what the fleet shares. The default is false.
	Insecure bool

	// Advertise is the address at which others reach this process, "ip:port", if that is not Bind.
	// Unset means Bind. If Bind is all addresses, unset means an IPv4 address of the host, a private
	// one if there is one, or else an IPv6 address. Over UDP only membership uses it: peers answer
	// to the address that packets come from.
	Advertise string

	// Network is "udp" or "tcp", the same in the whole fleet; unset means "udp". TCP is for
	// networks that drop UDP. It uses one stream to each peer: when the network loses a packet,
	// those after it wait.
	Network string

	// Seeds are addresses of processes to ask first, "host:port". Host names are resolved again at
	// each use. Seeds, DNS, File and [WithDiscovery] add up. With none of them the process waits
	// until another one finds it.
	Seeds []string

	// DNS is one name whose addresses are all processes, "name:port", such as a headless service.
	DNS string

	// File has one "host:port" a line, and comments after #. It is read again after each change.
	File string

	// Zone and Region say where this process runs. Peers of the same zone, then of the same region,
	// are served first. Up to 64 bytes each; unset counts as a place, too.
	Zone, Region string

	// Floor is the least time between two packets to one peer. An unacknowledged change is sent
	// again at each floor. It reaches its peer within (m-1)·Floor plus the delay of the network, if
	// one of m packets is nearly sure to arrive: m is 5 at 35 % independent loss and p99. In
	// [100µs, 1s]; unset means 2 ms.
	Floor time.Duration

	// KeepAlive is the longest time without a packet to a peer when there is nothing to send. In
	// this time a process sends two packets, to all its peers together. With more than two peers
	// each waits longer, and is told how long that may be.
	//
	// A peer is silent 20 keep-alives after the announced wait. It is lost 200 keep-alives after
	// it: then its address is tried every 1 to 5 s. In [Floor, 1m]; unset means 50 ms, or Floor if
	// that is more. It should be the same everywhere.
	KeepAlive time.Duration

	// MaxPeers bounds the known peers, dead ones included. At the bound the peer that was lost for
	// longest makes room. It is displaced, and is told so if it comes back. If no peer was lost for
	// ten minutes, the newcomer is refused and counted. In [1, 4096]; unset means 512. A peer costs
	// about 10 KB.
	MaxPeers int
}

func (g Gossip) config() gossip.NodeConfig {
	return gossip.NodeConfig{
		Config: gossip.Config{Zone: g.Zone, Region: g.Region, Floor: g.Floor, KeepAlive: g.KeepAlive, MaxPeers: g.MaxPeers},
		Bind:   g.Bind, Insecure: g.Insecure, Advertise: g.Advertise, Network: g.Network, Seeds: g.Seeds, DNS: g.DNS, File: g.File,
	}
}

var (
	// ErrClosed means that a Process has been closed.
	ErrClosed = gossip.ErrClosed

	// ErrDisplaced means that a later incarnation has the process's name, or that a peer dropped
	// this one to make room for newcomers, see [Gossip].MaxPeers.
	ErrDisplaced = gossip.ErrDisplaced
)

// Discovery finds addresses of the fleet's processes. Addrs is called every 1 to 5 s, so it should
// be cheap, and it must return when ctx ends. Addresses that come with an error are used, too. They
// may repeat, and may belong to this process or to dead ones.
type Discovery interface {
	Addrs(ctx context.Context) ([]netip.AddrPort, error)
}

// WithDiscovery adds d to Gossip's Seeds, DNS and File.
func WithDiscovery(d Discovery) Option {
	return func(o *options) { o.gossip = append(o.gossip, gossip.WithDiscovery(d)) }
}

// A Keyring has the keys that a fleet's processes share; [NewKeyring] makes one. One key, the
// primary, seals outgoing packets; all keys open incoming ones. It is safe for concurrent use. A
// change takes effect with the next packet.
//
// To change keys while the fleet runs, call Add with the new key, then Use with the new key, then
// Remove with the old one. Each step must be done in all processes before the next.
type Keyring gossip.Keyring

// NewKey makes a key: 32 random bytes.
func NewKey() []byte {
	key := make([]byte, gossip.KeySize)
	_, _ = rand.Read(key) // never fails
	return key
}

// NewKeyring returns a keyring; the first key is the primary. It takes 1 to 8 keys of 32 bytes
// each, else the error is [ErrConfig].
func NewKeyring(keys ...[]byte) (*Keyring, error) {
	k, err := gossip.NewKeyring(keys...)
	return (*Keyring)(k), keyError(err)
}

// Add adds a key that opens packets. It does nothing if the keyring has it. The error is
// [ErrConfig].
func (k *Keyring) Add(key []byte) error { return keyError((*gossip.Keyring)(k).Add(key)) }

// Use makes a key of the keyring the primary. The error is [ErrConfig].
func (k *Keyring) Use(key []byte) error { return keyError((*gossip.Keyring)(k).Use(key)) }

// Remove removes a key. It does nothing if the keyring does not have it. The primary cannot be
// removed: that is [ErrConfig].
func (k *Keyring) Remove(key []byte) error { return keyError((*gossip.Keyring)(k).Remove(key)) }

// Fingerprints returns the first eight bytes of each key's SHA-256, the primary first. They can be
// compared between processes, and open nothing.
func (k *Keyring) Fingerprints() []string { return (*gossip.Keyring)(k).Fingerprints() }

// WithKeyring seals all packets that the process sends. It refuses packets that no key of the ring
// has sealed. Without it nothing is encrypted or authenticated, and [Start] listens on loopback
// only.
func WithKeyring(k *Keyring) Option {
	return func(o *options) { o.gossip = append(o.gossip, gossip.WithKeyring((*gossip.Keyring)(k))) }
}

func keyError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrConfig, err)
}
