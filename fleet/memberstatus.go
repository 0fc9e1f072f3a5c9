// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

const (
	micro      = 1e6
	statusKeys = 32
)

// memberStatus returns this process's status, as the others are told.
func (p *Process) memberStatus() fleetstate.MemberStatus {
	l := p.limits.Stats()
	s := fleetstate.MemberStatus{
		Zone: p.cfg.Gossip.Zone, Region: p.cfg.Gossip.Region, Version: p.cfg.Program,
		Number: l.Number, Complete: l.Completed, Applied: l.Applied, Share: l.Share,
		Level: float64(l.Level) / micro, Cap: float64(l.Cap) / micro, Lent: float64(l.Lent) / micro, Pinned: float64(l.Pinned) / micro,
	}
	for _, peer := range p.node.Peers() {
		s.Unacked += peer.Unacked
		if peer.State == gossip.Fresh {
			s.SyncDelay = max(s.SyncDelay, peer.Delay)
		}
	}
	s.Keys = p.keys()
	return s
}

// keys returns this process's busiest keys.
func (p *Process) keys() (keys []fleetstate.KeyStatus) {
	for _, v := range p.limits.Busiest(statusKeys) {
		keys = append(keys, fleetstate.KeyStatus{
			Key: v.Key, Admitted: uint64(v.Admitted() / micro), Denied: uint64(v.Sums.Denied / micro),
			Level: float64(v.Level) / micro, Cap: float64(v.Cap) / micro,
		})
	}
	return keys
}
