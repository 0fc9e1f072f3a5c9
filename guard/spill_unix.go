// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guard

import (
	"fmt"

	"github.com/stormguard-mq/stormguard/internal/ringbuf/spill"
)

type (
	spillDir    = spill.Spill[[]byte]
	spillLane   = spill.Lane[[]byte]
	spillReader = spill.Reader[[]byte]
)

const maxLaneName = spill.MaxName

// blobs is the codec of the spill. It changes nothing: a source encodes its messages itself.
type blobs struct{}

func (blobs) Append(dst, v []byte) []byte       { return append(dst, v...) }
func (blobs) Decode(src []byte) ([]byte, error) { return src, nil }

// laneHolds tells how many messages a lane has, and how many are being written.
func laneHolds(l *spillLane) (count, pending int) {
	st := l.Stats()
	return st.Count, st.Pending
}

// openSpill opens Config.SpillDir, and logs damage and the messages in it.
func (g *Guard) openSpill() error {
	s, found, err := spill.Open(spill.Config{Dir: g.cfg.SpillDir, MaxBytes: g.cfg.SpillBytes}, blobs{},
		spill.WithState(func(st spill.State, err error) {
			g.spillState.Store(&spillState{st != spill.Failed && st != spill.Closed, st.String(), err, g.now()})
			if st != spill.Closed {
				g.spillNews.Store(true)
				g.sweeper.stir()
			}
		}),
		spill.WithDamage(func(d spill.Damage) {
			g.log.Warn("the spill is damaged: messages are passed over", "dir", g.cfg.SpillDir, "damage", d.String())
		}),
	)
	if err != nil {
		return fmt.Errorf("guard: Config.SpillDir: %w", err)
	}
	g.spill = s
	if st := s.Stats(); st.State != spill.Ready {
		g.spillState.Store(&spillState{st.State != spill.Failed, st.State.String(), st.Err, g.now()})
		g.spillNews.Store(true)
	}
	for _, d := range found.Damaged {
		g.log.Warn("the spill is damaged: messages are passed over", "dir", g.cfg.SpillDir, "damage", d.String())
	}
	if found.SetAside != nil {
		g.log.Warn("what is damaged in the spill could not be set aside: copy the directory before it drains", "dir", g.cfg.SpillDir, "error", found.SetAside)
	}
	if found.Messages > 0 {
		g.spillFound = make(map[string]bool)
		for l := range s.Lanes() {
			g.spillFound[l.Name()] = true
			g.log.Info("the spill has messages: they are handled first when their source is opened", "source", l.Name(), "messages", l.Len())
		}
	}
	return nil
}
