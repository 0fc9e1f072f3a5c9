// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"time"

	"github.com/spf13/cobra"

	access "github.com/stormguard-mq/stormguard/internal/operator"
)

var errTokenRefused = errors.New("the process refuses this command's token: give the right one by --token-file")

func newConsole() *cobra.Command {
	var o operate
	var listen string
	cmd := o.command(&cobra.Command{
		Use: "console", Short: "Show a process's console in a browser on this host", Args: cobra.NoArgs,
		Long: `Show a process's console in a browser on this host, until interrupted.

The page, and what it asks, goes through this command to --url, which adds the token
of --token-file: the browser never has it. The page itself asks for a token that this
command makes and prints, so that other users of this host cannot use it.`,
	}, func(cmd *cobra.Command, _ []string) error { return o.serveConsole(cmd, listen) })
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:8791", "loopback `address` to serve the page at")
	return cmd
}

// serveConsole passes a browser's requests on to the process, until the command's context ends.
func (o *operate) serveConsole(cmd *cobra.Command, listen string) error {
	host, _, err := net.SplitHostPort(listen)
	if err != nil || !isLoopback(host) {
		return usageError{fmt.Errorf("--listen %q: want a loopback address and a port, such as 127.0.0.1:8791", listen)}
	}
	base, err := o.base()
	if err != nil {
		return err
	}
	ask, err := http.NewRequestWithContext(cmd.Context(), http.MethodGet, base+"/", nil)
	if err != nil {
		return usageError{fmt.Errorf("--url %q: %w", o.url, err)}
	}
	client, err := o.client(ask)
	if err != nil {
		return err
	}
	far, auth := ask.URL, ask.Header.Get("Authorization")
	proxy := &httputil.ReverseProxy{
		Transport:     client.Transport,
		FlushInterval: -1, // events must not wait
		ErrorLog:      slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(far)
			r.Out.Header.Del("Authorization")
			r.Out.Header.Del("Cookie") // a browser also sends cookies of other ports on this host
			r.Out.Header.Del("Origin") // door has checked the origin
			r.Out.Header.Del("Sec-Fetch-Site")
			if auth != "" {
				r.Out.Header.Set("Authorization", auth)
			}
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			if !errors.Is(err, errTokenRefused) {
				err = fmt.Errorf("nobody answers at %s: %w", o.url, err)
			}
			access.Answer(w, http.StatusBadGateway, map[string]string{"error": err.Error()})
		},
		ModifyResponse: func(a *http.Response) error {
			a.Header.Del("Set-Cookie")
			if a.StatusCode == http.StatusUnauthorized { // with this status the page would ask for its own token again
				return errTokenRefused
			}
			return nil
		},
	}
	secret := rand.Text()
	door := access.New("console", slog.New(slog.DiscardHandler), []access.Token{{Name: "browser", Secret: secret}})
	door.Page = true
	l, err := (&net.ListenConfig{}).Listen(cmd.Context(), "tcp", listen)
	if err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "http://%s/ shows %s. It asks for this token: %s\n", l.Addr(), o.url, secret)
	server := &http.Server{Handler: door.Guard(proxy), ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context { return cmd.Context() }}
	stop := context.AfterFunc(cmd.Context(), func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
